// The simulated step: one lane for each thing that a device does at a time. It is drawn on a canvas, zoomed with the
// wheel, buttons or keys, and says what lies under the pointer.

class StreamsPicture {
  constructor(article, view) {
    this.place = article.querySelector(".streams");
    this.streams = view.streams;
    if (!this.place) return;
    this.canvas = this.place.querySelector("canvas");
    this.said = this.place.querySelector(".under-pointer");
    this.from = 0;
    this.to = this.streams.seconds;
    this.bars = this.everything();
    this.listen();
    this.draw();
    this.chart = this; // it is drawn again with the others
  }

  // [lane, start, end, name, is a whole block]
  everything() {
    const bars = [];
    const unroll = (start, tasks, block, starts = []) => {
      let now = start;
      tasks.forEach(([lane, name, seconds], i) => {
        now = starts[i] ?? now;
        bars.push([lane, now, now + seconds, name, block]);
        now += seconds;
      });
    };
    for (const [name, start, end, list, starts] of this.streams.turns) {
      unroll(start, this.streams.lists[list], name, starts);
      bars.push([0, start, end, name, ""]);
    }
    for (const [name, start, list] of this.streams.messages) unroll(start, this.streams.lists[list], name || "outside of the layers");
    return bars;
  }

  listen() {
    const middle = () => (this.from + this.to) / 2;
    const actions = { "+": () => this.zoom(0.5, middle()), "-": () => this.zoom(2, middle()), ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), Home: () => this.zoom(Infinity, 0) };
    for (const button of this.place.querySelectorAll("button")) button.addEventListener("click", () => actions[button.dataset.key]());
    this.canvas.addEventListener("keydown", (event) => {
      const action = actions[event.key === "=" ? "+" : event.key];
      if (action) { action(); event.preventDefault(); }
    });
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls as usual
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.when(event.offsetX));
      event.preventDefault();
    }, { passive: false });
    this.canvas.addEventListener("pointermove", (event) => this.say(event.offsetX, event.offsetY));
  }

  when(x) { return this.from + (x / this.width) * (this.to - this.from); }

  zoom(factor, around) {
    const length = Math.min(this.streams.seconds, (this.to - this.from) * factor);
    this.from = Math.max(0, Math.min(around - (around - this.from) * (length / (this.to - this.from)), this.streams.seconds - length));
    this.to = this.from + length;
    this.draw();
  }

  pan(share) {
    const length = this.to - this.from;
    this.from = Math.max(0, Math.min(this.from + share * length, this.streams.seconds - length));
    this.to = this.from + length;
    this.draw();
  }

  // The first lane has two rows: whole blocks above what they consist of.
  row([lane, , , , block]) { return lane === 0 && block === "" ? 0 : lane + 1; }

  draw() {
    const names = ["blocks", ...this.streams.lanes];
    const height = 34;
    this.width = Math.max(300, this.place.clientWidth);
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = this.width * scale;
    this.canvas.height = (height * names.length + 22) * scale;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${height * names.length + 22}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    const colours = ["--hidden", "--compute", "--waited", "--s2", "--s3"].map(colourOf);
    const across = (time) => ((time - this.from) / (this.to - this.from)) * this.width;
    for (const bar of this.bars) {
      if (bar[2] < this.from || bar[1] > this.to) continue;
      const row = this.row(bar), left = Math.max(-1, across(bar[1])), wide = Math.min(this.width + 1, across(bar[2])) - left;
      pen.fillStyle = colours[row];
      pen.fillRect(left, row * height + 14, Math.max(wide - (wide > 3 ? 1 : 0), 0.4), 18);
      if (wide > 60) {
        pen.save();
        pen.beginPath();
        pen.rect(left, row * height + 14, wide - 2, 18);
        pen.clip();
        pen.fillStyle = colourOf("--card");
        pen.fillText(bar[3], Math.max(left, 0) + 4, row * height + 27);
        pen.restore();
      }
    }
    pen.fillStyle = colourOf("--quiet");
    names.forEach((name, row) => pen.fillText(name, 2, row * height + 10));
    for (const [phase, start] of this.streams.phases) {
      const x = across(start);
      if (x < 70 || x > this.width) continue; // it began before, or where lanes have their names
      pen.textAlign = x > this.width - 60 ? "right" : "left";
      pen.fillText(phase, x + (pen.textAlign === "left" ? 4 : -4), 10);
      pen.fillRect(x, 0, 1, height * names.length);
    }
    for (let tick = 0; tick <= 4; tick++) {
      pen.textAlign = ["left", "center", "center", "center", "right"][tick];
      pen.fillText(seconds(this.from + (tick / 4) * (this.to - this.from)), (tick / 4) * this.width, height * names.length + 14);
    }
  }

  say(x, y) {
    const time = this.when(x), row = Math.floor(y / 34), slack = (this.to - this.from) / this.width;
    const found = this.bars.filter((bar) => this.row(bar) === row && bar[1] - slack <= time && time <= bar[2] + slack);
    const bar = found.sort((a, b) => a[2] - a[1] - (b[2] - b[1])).at(-1);
    this.said.textContent = bar ? `${bar[3]}${bar[4] ? ` (${bar[4]})` : ""}: ${seconds(bar[2] - bar[1])}, from ${seconds(bar[1])} on` : "";
  }
}
