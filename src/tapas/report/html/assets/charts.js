// Memory over the step, and step time against memory.

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axis(values, rest = {}) {
  const line = { stroke: colourOf("--line"), width: 1 };
  return { stroke: colourOf("--quiet"), grid: line, ticks: line, values, ...rest };
}

// Kinds piled up, in the order of the plan; the step runs from the first block to the last one and back.
class MemoryChart {
  constructor(article, view) {
    this.place = article.querySelector(".over-time");
    this.key = article.querySelector(".kinds");
    this.view = view;
    this.kinds = Object.keys(view.kinds).filter((kind) => view.timeline.some((point) => point.nbytes[kind] > 0));
    if (this.place) this.draw();
  }

  draw() {
    this.chart?.destroy();
    const copies = this.view.copies.length;
    const when = { forward: (c) => c + 1, backward: (c) => 2 * copies - c, update: () => 2 * copies + 1 };
    const x = this.view.timeline.map((point) => when[point.phase](point.copy));
    const piled = [];
    this.kinds.forEach((kind, k) => piled.push(this.view.timeline.map((point, i) => (piled[k - 1]?.[i] ?? 0) + (point.nbytes[kind] ?? 0))));
    // the top of the pile is drawn first, so that each kind shows above the ones below it
    const series = this.kinds.map((kind, k) => ({ label: kind, stroke: colourOf(`--m${k}`), fill: colourOf(`--m${k}`), width: 1, points: { show: false } })).reverse();
    const top = Math.max(this.view.allowed, ...piled.at(-1)) * 1.04;
    const labels = { 1: "start", [copies]: "forward done", [2 * copies]: "backward done" };
    const options = {
      width: Math.max(300, this.place.clientWidth), height: 260, padding: [10, 46, 0, 0], legend: { show: false }, cursor: { show: false }, series: [{}, ...series],
      scales: { x: { time: false, range: [Math.min(...x), Math.max(...x)] }, y: { range: [0, top] } },
      axes: [axis((_, ticks) => ticks.map((tick) => labels[tick] ?? ""), { splits: () => Object.keys(labels).map(Number) }), axis((_, ticks) => ticks.map((tick) => nbytes(tick)), { size: 70 })],
      hooks: { draw: [(chart) => this.limit(chart)] },
    };
    this.chart = new uPlot(options, [x, ...piled.reverse()], this.place);
    const names = this.kinds.map((kind, k) => element("span", {}, element("i", { style: `background: var(--m${k})` }), this.view.kinds[kind]));
    this.key.replaceChildren(...names, element("span", {}, `┄ what a device has for the plan: ${nbytes(this.view.allowed)}`));
  }

  limit(chart) {
    const y = chart.valToPos(this.view.allowed, "y", true);
    const { left, width } = chart.bbox;
    chart.ctx.save();
    chart.ctx.strokeStyle = colourOf("--text");
    chart.ctx.setLineDash([6, 4]);
    chart.ctx.beginPath();
    chart.ctx.moveTo(left, y);
    chart.ctx.lineTo(left + width, y);
    chart.ctx.stroke();
    chart.ctx.restore();
  }
}

class CurveChart {
  constructor(article, view) {
    this.place = article.querySelector(".curve");
    this.view = view;
    if (this.place && view.curve.length) this.draw();
  }

  draw() {
    this.chart?.destroy();
    const points = [...this.view.curve].sort((a, b) => a.memory - b.memory);
    const options = {
      width: Math.max(300, this.place.clientWidth), height: 280, legend: { show: false }, cursor: { show: false },
      scales: { x: { time: false } },
      series: [{}, { stroke: colourOf("--compute"), width: 2, points: { show: true, size: 8, fill: colourOf("--card") } }],
      axes: [axis((_, ticks) => ticks.map(nbytes)), axis((_, ticks) => ticks.map(seconds), { size: 70 })],
    };
    this.chart = new uPlot(options, [points.map((p) => p.memory), points.map((p) => p.seconds)], this.place);
  }
}
