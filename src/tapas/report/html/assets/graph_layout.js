// From blocks and operators to places on a canvas: which nodes there are, what joins them, and where dagre puts them.

const LINE = 15;
const ASIDE = 46; // what an operator's box is wider than the weights above it: arrows from above end there
const textWidth = (text, each = 6.9) => text.length * each;

// The nodes that a tensor of a block comes from; operators that are not shown are looked through.
function sources(block, b, shown, reference, seen = new Set()) {
  if (reference[0] === "c") return [];
  if (reference[0] === "p") return [`b${b}in`];
  if (block.shared[reference] && !seen.has("shared")) return [`b${b}t${reference}`];
  if (reference[0] === "w") return [];
  const number = Number(reference.split(".")[0]);
  if (shown.has(number)) return [`b${b}o${number}`];
  if (seen.has(number)) return [];
  seen.add(number);
  seen.delete("shared");
  return [...new Set(block.operators[number].operands.flatMap((o) => sources(block, b, shown, o.from, seen)))];
}

// Whether an operator brings several branches together, as a residual sum does.
function joins(block, b, shown, op) {
  const from = op.operands.map((operand) => sources(block, b, shown, operand.from).join());
  return op.kind === "add" && new Set(from.filter(Boolean)).size > 1;
}

function moveLines(moves) {
  const [move] = moves;
  const lines = [];
  if (move.forward) lines.push(`↓ ${move.forward}`);
  if (move.backward) lines.push(`↑ ${move.backward}`);
  const time = move.seconds >= NOTHING ? seconds(move.seconds) : "";
  const hidden = move.hidden >= NOTHING ? `${seconds(move.hidden)} hidden` : "";
  lines.push(nbytes(move.nbytes), [time, hidden].filter(Boolean).join(", "));
  return lines.filter(Boolean);
}

const covered = (moves) => moves.every((move) => move.hidden > move.seconds);

class Picture {
  constructor(view, open, every) {
    this.view = view;
    this.open = open;
    this.every = every;
    this.graph = new dagre.graphlib.Graph({ compound: true, multigraph: false });
    this.graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 26, edgesep: 12, marginx: 20, marginy: 20 });
    view.blocks.forEach((block, b) => (open.has(b) ? this.opened(block, b) : this.closed(block, b)));
    for (const link of view.links) {
      if (link.from === link.to) continue;
      const from = open.has(link.from) ? `b${link.from}out` : `b${link.from}`;
      const to = open.has(link.to) ? `b${link.to}in` : `b${link.to}`;
      this.join(from, to);
    }
    dagre.layout(this.graph);
    for (const edge of this.graph.edges()) this.end(this.graph.edge(edge), this.graph.node(edge.w));
  }

  // An arrow to an operator with weights above it goes past them.
  end(edge, { kind, stacks, x, y, width, height, own }) {
    if (kind !== "operator" || !stacks.length) return;
    const aside = x - width / 2 + ASIDE / 2 - 4;
    edge.points.splice(-1, 1, { x: aside, y: y - height / 2 - 4 }, { x: aside, y: y + height / 2 - own - 30 }, { x: aside, y: y + height / 2 - own });
  }

  node(id, width, height, rest) {
    this.graph.setNode(id, { width, height, ...rest });
  }

  join(from, to, moves = []) {
    if (from === to || !this.graph.hasNode(from) || !this.graph.hasNode(to)) return;
    const known = this.graph.edge(from, to);
    if (known && (known.moves.length || !moves.length)) return;
    const lines = moves.length ? moveLines(moves) : [];
    const width = lines.length ? Math.max(...lines.map((line) => textWidth(line, 6.2))) + 12 : 0;
    this.graph.setEdge(from, to, { moves, lines, width, height: lines.length * 14 + (lines.length ? 6 : 0), labelpos: "c" });
  }

  closed(block, b) {
    const width = Math.max(250, textWidth(block.name, 7.4) + 90);
    this.node(`b${b}`, width, 58, { kind: "block", b });
  }

  opened(block, b) {
    const group = `b${b}`;
    this.graph.setNode(group, { kind: "cluster", b });
    const shown = new Set();
    block.operators.forEach((op, i) => {
      const shares = Object.keys(block.shared).some((reference) => reference.startsWith(`${i}.`));
      if (this.every || op.shown || shares) shown.add(i);
      else if (joins(block, b, shown, op)) shown.add(i);
    });
    this.inside(group, `b${b}in`, 120, 22, { kind: "pill", text: block.ports ? "from blocks before" : "inputs" });
    for (const i of shown) this.operator(block, b, i);
    for (const [reference, moves] of Object.entries(block.shared)) {
      this.inside(group, `b${b}t${reference}`, 14, 14, { kind: "joint" });
      if (reference[0] === "w") this.weight(block, b, reference, `b${b}t${reference}`, moves);
      const from = reference[0] === "w" ? [] : sources(block, b, shown, reference, new Set(["shared"]));
      for (const source of from) this.join(source, `b${b}t${reference}`, moves);
    }
    for (const i of shown) this.reads(block, b, i, shown);
    this.inside(group, `b${b}out`, 120, 22, { kind: "pill", text: "to blocks after" });
    for (const reference of block.exports) {
      for (const source of sources(block, b, shown, reference)) this.join(source, `b${b}out`);
    }
  }

  inside(group, id, width, height, rest) {
    this.node(id, width, height, rest);
    this.graph.setParent(id, group);
  }

  // An operator, with the weights that are moved for it above the right part of its box.
  operator(block, b, i) {
    const op = block.operators[i];
    const small = !op.shown;
    const stacks = op.operands.flatMap((o) => (o.from[0] === "w" && o.moves.length && !block.shared[o.from] ? [this.stack(block, o)] : []));
    const name = small ? op.kind : op.name || op.kind;
    const texts = small ? textWidth(name, 7.4) : Math.max(textWidth(name, 7.4), textWidth(op.split, 6.4), textWidth(op.kind, 6.4) + 62);
    const width = Math.max(Math.min(300, texts + 26), ...stacks.map((stack) => stack.width + ASIDE), small ? 60 : 150);
    const own = small ? 26 : 60;
    const above = stacks.reduce((sum, stack) => sum + stack.height, 0);
    this.inside(`b${b}`, `b${b}o${i}`, width, own + above, { kind: "operator", b, i, stacks, own, small });
  }

  stack(block, operand) {
    const weight = block.weights[Number(operand.from.slice(1))];
    const texts = moveLines(operand.moves);
    const width = Math.max(...texts.map((line) => textWidth(line, 6.2)), textWidth(weight.shape, 6.4)) + 14;
    return { text: weight.shape, texts, width, height: 22 + 8 + texts.length * 14 + 6 + 12, covered: covered(operand.moves) };
  }

  reads(block, b, i, shown) {
    let found = false;
    for (const operand of block.operators[i].operands) {
      const from = sources(block, b, shown, operand.from);
      for (const source of from) this.join(source, `b${b}o${i}`, operand.moves);
      found ||= from.length > 0;
    }
    if (!found) this.join(`b${b}in`, `b${b}o${i}`);
  }

  weight(block, b, reference, reader, moves) {
    const id = `b${b}${reference}-${reader}`;
    const text = `weight ${block.weights[Number(reference.slice(1))].shape}`;
    this.inside(`b${b}`, id, textWidth(text, 6.4) + 16, 22, { kind: "pill", text, weight: true });
    this.join(id, reader, moves);
  }
}
