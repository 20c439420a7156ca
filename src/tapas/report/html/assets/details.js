// All that is known of one operator: how it is split, what it reads and leaves, what is sent for it, and what else it
// could do.

class Details {
  constructor(article, view) {
    this.view = view;
    this.place = article.querySelector(".details");
    this.untried = article.querySelector(".untried");
    this.alternatives = new Map((view.alternatives ?? []).map((a) => [`${a.block} ${a.operator}`, a]));
  }

  show(b, i) {
    const block = this.view.blocks[b];
    const op = block.operators[i];
    const times = block.copies > 1 ? `, ${block.copies} times` : "";
    const inside = op.communication ? `, ${seconds(op.communication)} of communication inside` : "";
    this.place.replaceChildren(
      element("h3", {}, op.name || op.kind),
      element("p", {}, `${op.kind} in ${block.name}${times}; ${seconds(op.seconds)} of compute each${inside}`),
      op.missing ? element("p", { class: "bad" }, "There is no rule for this operator: it runs whole on every device.") : "",
      ...this.factors(op), ...this.sent(block, op), ...this.others(b, i), ...this.layouts(block, op));
  }

  factors(op) {
    const sizes = this.view.mesh.sizes;
    const rows = op.axes.map(({ axis, factor, does }, a) => [`${axis} (${sizes[a]} devices)`, does || "every device does all of it", factor || "–"]);
    return [element("h4", {}, "How its work is split"), table(["axis", "split on", "factor"], rows), op.factors ? element("p", {}, "factors: ", element("code", {}, op.factors)) : ""];
  }

  layouts(block, op) {
    const names = { w: (n) => block.weights[n].name, p: () => "from another block", c: () => "constant or input" };
    const name = (from) => names[from[0]]?.(Number(from.slice(1))) ?? `${block.operators[Number(from.split(".")[0])].name || "result"} (${block.operators[Number(from.split(".")[0])].kind})`;
    const row = (what, one) => [element("span", {}, what, element("small", {}, layoutWords(one.layout, this.view.mesh.names))), element("span", {}, shape(one.shape), element("small", {}, `a device: ${shape(one.local)}`))];
    const rows = [...op.operands.map((o) => row(name(o.from), o)), ...op.results.map((r) => row("→ its result", r))];
    return [element("h4", {}, "What it reads (after what is sent) and makes, on each device"), table(["tensor and layout", "shape"], rows)];
  }

  sent(block, op) {
    const shared = op.operands.flatMap((operand) => block.shared[operand.from] ?? []);
    const moves = [...op.operands.flatMap((operand) => operand.moves), ...shared];
    const times = (move) => [move.seconds >= NOTHING ? `${seconds(move.seconds)} waited for` : "", move.hidden >= NOTHING ? `${seconds(move.hidden)} hidden` : ""].filter(Boolean).join(", ");
    const ways = (move) => [move.forward && `${move.forward} forward`, move.backward && `${move.backward} backward`].filter(Boolean).join(", ");
    const how = (move) => `${ways(move)}; ${times(move)}${move.copies > 1 ? `, ${move.copies} times a step` : ""}`;
    const rows = moves.map((move) => [element("span", {}, move.tensor, element("small", {}, how(move))), nbytes(move.nbytes)]);
    const none = element("p", {}, "Nothing: it finds everything as it needs it.");
    return [element("h4", {}, "What devices send for it"), rows.length ? table(["tensor, how and how long", "size"], rows) : none];
  }

  others(b, i) {
    const title = element("h4", {}, "What else it could do, and the step time then");
    const found = this.alternatives.get(`${b} ${i}`);
    if (!found?.others.length) return [title, this.untried.content.cloneNode(true)];
    const { others, untried } = found;
    const known = others.filter((other) => other.cost !== null);
    const rows = known.map((other) => {
      const more = other.cost - this.view.cost;
      const percent = (100 * more) / this.view.cost;
      const same = Math.abs(percent) < 0.005;
      const text = same ? "as fast" : `${more > 0 ? "+" : "−"}${seconds(Math.abs(more))} (${percent > 0 ? "+" : "−"}${Math.abs(percent).toFixed(2)}%)`;
      const large = other.nbytes > this.view.allowed ? element("small", { class: "bad" }, `does not fit: ${nbytes(other.nbytes)}`) : "";
      const what = element("span", {}, instead(other), large, other.why ? element("small", {}, other.why) : "");
      return [what, element("span", {}, seconds(other.cost), element("small", { class: same ? "" : more > 0 ? "more" : "less" }, text))];
    });
    const never = others.filter((other) => other.cost === null).map(instead);
    return [
      title,
      element("p", { class: "hint" }, "Each is forced on one axis, in all copies of the block; everything else is then chosen anew, as well as the search can."),
      table(["split instead on", "step time"], rows),
      never.length ? element("p", { class: "hint" }, `Not possible, or never better: ${never.join(", ")}.`) : "",
      untried ? element("p", { class: "hint" }, `There was no time for ${untried} more: --alternatives SECONDS gives more.`) : "",
    ];
  }
}

const instead = (other) => (other.does === "whole" ? `not split over ${other.axis}` : `${other.does} over ${other.axis}`);

function table(head, rows) {
  const cells = (row) => row.map((cell, i) => element(i ? "td" : "th", i ? {} : { scope: "row" }, cell));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row)))));
}
