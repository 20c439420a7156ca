// The folded model, drawn: blocks that open, operators that can be chosen, and what moves between them.

const COLOURS = 8;
const SMALLEST = 0.75; // scale of a drawing that is wider than its place
const colour = (view, split) => `s${Math.min(view.splits.indexOf(split), COLOURS - 1)}`;

// A curve through the points that dagre gives, from middle to middle.
function curve(points) {
  const [first, ...rest] = points;
  let path = `M${first.x},${first.y}`;
  for (let i = 0; i < rest.length - 1; i++) {
    const middle = { x: (rest[i].x + rest[i + 1].x) / 2, y: (rest[i].y + rest[i + 1].y) / 2 };
    path += ` Q${rest[i].x},${rest[i].y} ${middle.x},${middle.y}`;
  }
  return `${path} L${rest.at(-1).x},${rest.at(-1).y}`;
}

function lines(texts, x, y, attributes = () => ({})) {
  return texts.map((text, i) => drawn("text", { x, y: y + i * LINE, ...attributes(i) }, text));
}

class ModelGraph {
  constructor(article, view, details) {
    this.view = view;
    this.details = details;
    this.canvas = article.querySelector(".canvas");
    this.every = article.querySelector(".every");
    this.filter = article.querySelector(".filter");
    this.output = article.querySelector(".found");
    this.rows = [...article.querySelectorAll(".weights tbody tr")];
    this.open = new Set();
    this.chosen = null;
    this.split = null;
    const time = (block) => block.copies * (block.compute + block.waited);
    const longest = view.blocks.reduce((best, block, b) => (time(block) > time(view.blocks[best]) ? b : best), 0);
    if (view.blocks.length) this.open.add(longest);
    this.legend(article.querySelector(".legend"));
    this.every.addEventListener("change", () => this.draw());
    this.filter.addEventListener("input", () => this.mark());
    this.filter.addEventListener("keydown", (event) => event.key === "Enter" && this.first());
    if (view.main) this.choose(...view.main);
    this.draw();
  }

  legend(place) {
    this.view.splits.forEach((split) => {
      const button = element("button", { type: "button", class: colour(this.view, split), "aria-pressed": "false" }, element("i"), split);
      button.addEventListener("click", () => {
        this.split = this.split === split ? null : split;
        for (const other of place.children) other.setAttribute("aria-pressed", String(other === button && this.split !== null));
        this.mark();
      });
      place.append(button);
    });
  }

  draw() {
    const { graph } = new Picture(this.view, this.open, this.every.checked);
    const { width, height } = graph.graph();
    const scale = Math.min(1, Math.max(SMALLEST, (this.canvas.clientWidth - 4) / width));
    const svg = drawn("svg", { width: width * scale, height: height * scale, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Blocks and operators" });
    svg.append(drawn("defs", {}, drawn("marker", { id: `arrow-${this.view.letter}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 10, markerHeight: 10, markerUnits: "userSpaceOnUse", orient: "auto" }, drawn("path", { d: "M0,0 L8,4 L0,8 z" }))));
    const names = graph.nodes();
    for (const id of names) if (graph.node(id).kind === "cluster") svg.append(this.cluster(graph.node(id)));
    for (const edge of graph.edges()) svg.append(...this.edge(graph.edge(edge)));
    for (const id of names) {
      const made = this.node(graph.node(id));
      if (made) svg.append(...[made.weights, made].filter(Boolean));
    }
    const focused = document.activeElement?.dataset?.place;
    this.canvas.replaceChildren(svg);
    this.nodes = [...svg.querySelectorAll(".node")];
    if (focused) this.nodes.find((node) => node.dataset.place === focused)?.focus({ preventScroll: true });
    this.mark();
  }

  edge({ points, moves, lines: texts, x, y, width }) {
    const kind = moves.length ? `edge moved${covered(moves) ? " covered" : ""}` : "edge";
    const path = drawn("path", { class: kind, d: curve(points), "marker-end": `url(#arrow-${this.view.letter})`, "aria-hidden": "true" });
    return texts.length ? [path, this.label(x, y, width, texts)] : [path];
  }

  cluster({ x, y, width, height, b }) {
    const top = y - height / 2 - 8;
    return drawn("g", { class: "cluster" }, drawn("rect", { x: x - width / 2, y: top, width, height: height + 14, rx: 10 }), this.toggle(b, x - width / 2 + 10, top - 15, true), this.account(b, x + width / 2 - 12, top + 14));
  }

  // What a copy takes, and how much of that is in operators that are not drawn.
  account(b, x, y) {
    const block = this.view.blocks[b];
    const undrawn = this.every.checked ? 0 : block.operators.filter((op) => !op.shown).reduce((sum, op) => sum + op.seconds, 0);
    const rest = undrawn >= NOTHING ? `, ${seconds(undrawn)} of it in operators that are not drawn` : "";
    return drawn("text", { class: "small", x, y, "text-anchor": "end" }, `${seconds(block.compute + block.waited)} a copy${rest}`);
  }

  toggle(b, x, y, open) {
    const block = this.view.blocks[b];
    const text = `${open ? "▾" : "▸"} ${block.name}${block.copies > 1 ? ` × ${block.copies}` : ""}`;
    const width = textWidth(text, 7.6) + 18;
    const group = drawn("g", { class: "node block", role: "button", tabindex: 0, "aria-expanded": String(open), "data-place": `b${b}` },
      drawn("rect", { class: "box", x, y, width, height: 26, rx: 7 }), drawn("text", { class: "bold", x: x + 9, y: y + 17 }, text));
    return this.pressed(group, () => this.turn(b));
  }

  turn(b) {
    if (!this.open.delete(b)) this.open.add(b);
    this.draw();
  }

  node(node) {
    if (node.kind === "block") return this.closed(node);
    if (node.kind === "operator") return this.operator(node);
    if (node.kind === "joint") return drawn("circle", { cx: node.x, cy: node.y, r: 4, class: "edge", "aria-hidden": "true" });
    if (node.kind !== "pill") return null;
    return drawn("g", { class: node.weight ? "pill weight" : "pill", "aria-hidden": "true" },
      drawn("rect", { x: node.x - node.width / 2, y: node.y - node.height / 2, width: node.width, height: node.height, rx: 11 }),
      drawn("text", { class: "small", x: node.x, y: node.y + 4, "text-anchor": "middle" }, node.text));
  }

  closed({ x, y, width, height, b }) {
    const block = this.view.blocks[b];
    const share = this.view.cost ? (block.copies * (block.compute + block.waited)) / this.view.cost : 0;
    const figures = `${many(block.operators.length, "operator")}, ${(100 * share).toFixed(share < 0.1 ? 1 : 0)}% of the step`;
    const left = x - width / 2;
    const group = drawn("g", { class: "node block", role: "button", tabindex: 0, "aria-expanded": "false", "data-place": `b${b}` },
      drawn("rect", { class: "box", x: left, y: y - height / 2, width, height, rx: 9 }),
      drawn("text", { class: "bold", x: left + 14, y: y - 5 }, `▸ ${block.name}${block.copies > 1 ? ` × ${block.copies}` : ""}`),
      drawn("text", { class: "small", x: left + 14, y: y + 14 }, figures));
    return this.pressed(group, () => this.turn(b));
  }

  operator({ x, y, width, height, b, i, stacks, own, small }) {
    const op = this.view.blocks[b].operators[i];
    const left = x - width / 2;
    const top = y + height / 2 - own;
    const fits = (text, each) => (textWidth(text, each) > width - 18 ? `${text.slice(0, Math.floor((width - 24) / each))}…` : text);
    const full = [fits(op.name || op.kind, 7.4), fits(op.split, 6.4), `${op.kind}, ${seconds(op.seconds)}`];
    const texts = small ? [fits(op.kind, 7.4)] : full;
    const group = drawn("g", { class: `node operator ${colour(this.view, op.split)}`, role: "button", tabindex: 0, "data-place": `b${b}o${i}`, "data-split": op.split, "data-text": haystack(op) },
      drawn("rect", { class: "box", x: left, y: top, width, height: own, rx: 7 }),
      drawn("rect", { class: "side", x: left, y: top + 4, width: 5, height: own - 8, rx: 2 }),
      ...lines(texts, left + 13, top + 17, (line) => ({ class: line ? "small" : "bold" })));
    group.weights = drawn("g", { "aria-hidden": "true" }, ...this.weights(stacks, left + width, y - height / 2));
    return this.pressed(group, () => this.choose(b, i));
  }

  // Weights on their way to an operator: what they are, an arrow, and what is sent.
  weights(stacks, right, top) {
    const parts = [];
    for (const { text, texts, width, height, covered: hidden } of stacks) {
      const x = right - width / 2;
      const pill = textWidth(text, 6.4) + 18;
      const below = top + 30;
      parts.push(
        drawn("path", { class: `edge moved${hidden ? " covered" : ""}`, d: `M${x},${top + 22} L${x},${top + height - 1}`, "marker-end": `url(#arrow-${this.view.letter})` }),
        drawn("g", { class: "pill weight" }, drawn("rect", { x: x - pill / 2, y: top, width: pill, height: 22, rx: 11 }), drawn("text", { class: "small", x, y: top + 15, "text-anchor": "middle" }, text)),
        this.label(x, below + (texts.length * 14 + 6) / 2, width, texts));
      top += height;
    }
    return parts;
  }

  label(x, y, width, texts) {
    const height = texts.length * 14 + 6;
    return drawn("g", { class: "label", "aria-hidden": "true" },
      drawn("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 4 }),
      ...texts.map((text, i) => drawn("text", { x, y: y - height / 2 + 14 + i * 14, "text-anchor": "middle" }, text)));
  }

  pressed(group, action) {
    group.addEventListener("click", action);
    group.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") action();
      else if (event.key === "ArrowDown" || event.key === "ArrowRight") this.step(group, 1);
      else if (event.key === "ArrowUp" || event.key === "ArrowLeft") this.step(group, -1);
      else return;
      event.preventDefault();
    });
    return group;
  }

  step(group, by) {
    const nodes = this.nodes.filter((node) => !node.classList.contains("dim"));
    nodes[nodes.indexOf(group) + by]?.focus();
  }

  choose(b, i) {
    this.chosen = `b${b}o${i}`;
    this.details.show(b, i);
    if (this.nodes) this.mark();
  }

  // Which operators a filter leaves: the others are dimmed, and so are the rows of their weights.
  mark() {
    const wanted = this.filter.value.trim().toLowerCase();
    const left = (text, split) => text.includes(wanted) && (this.split === null || split === this.split);
    for (const node of this.nodes) {
      if (node.dataset.split === undefined) continue;
      for (const part of [node, node.weights]) part.classList.toggle("dim", !left(node.dataset.text, node.dataset.split));
      node.classList.toggle("chosen", node.dataset.place === this.chosen);
    }
    for (const row of this.rows) row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
    this.found = this.view.blocks.flatMap((block, b) => block.operators.flatMap((op, i) => (left(haystack(op), op.split) ? [[b, i]] : [])));
    const all = this.view.blocks.reduce((sum, block) => sum + block.operators.length, 0);
    this.output.textContent = wanted || this.split ? `${this.found.length} of ${all} operators` : "";
  }

  // Enter in the filter: the first operator that it leaves, wherever it is.
  first() {
    if (!this.found.length) return;
    const shown = ([b, i]) => this.view.blocks[b].operators[i].shown;
    const [b, i] = this.found.find(shown) ?? this.found[0];
    this.open.add(b);
    if (!this.view.blocks[b].operators[i].shown) this.every.checked = true;
    this.chosen = `b${b}o${i}`;
    this.details.show(b, i);
    this.draw();
    const node = this.nodes.find((other) => other.dataset.place === this.chosen);
    node?.focus();
    node?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

function haystack(op) {
  const moves = op.operands.flatMap((operand) => operand.moves.flatMap((move) => [move.forward, move.backward, move.tensor]));
  return [op.name, op.kind, op.target, op.split, ...op.weights, ...moves].join(" ").toLowerCase();
}
