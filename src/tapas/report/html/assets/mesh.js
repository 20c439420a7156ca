// The mesh, with who holds which slice of a chosen weight.

class MeshPicture {
  constructor(article, view) {
    this.view = view;
    this.place = article.querySelector(".mesh");
    if (!view.weights.length) return;
    this.place.hidden = false;
    this.select = this.place.querySelector(".weight");
    this.devices = this.place.querySelector(".devices");
    this.text = this.place.querySelector(".slice");
    this.drawing = this.place.querySelector(".drawing");
    view.weights.forEach((weight, i) => this.select.append(element("option", { value: i }, `${weight.name}  (${shape(weight.shape)}; ${weight.stored})`)));
    const split = view.weights.findIndex((weight) => weight.name.endsWith("q_proj.weight"));
    this.select.value = String(Math.max(0, split));
    this.select.addEventListener("change", () => this.show());
    this.device = 0;
    this.grid();
    this.show();
  }

  coordinate(device) {
    const found = [];
    for (const size of [...this.view.mesh.sizes].reverse()) {
      found.unshift(device % size);
      device = Math.floor(device / size);
    }
    return found;
  }

  // Columns are the last axis, or all the others where these are more.
  grid() {
    const { names, sizes } = this.view.mesh;
    const last = sizes.at(-1);
    const others = sizes.slice(0, -1).reduce((a, b) => a * b, 1);
    const across = others > last;
    const columns = across ? others : last;
    const rest = names.slice(0, -1).join(", ") || "one row";
    const axes = across ? `→ ${rest}, ↓ ${names.at(-1)}` : `→ ${names.at(-1)}${sizes.length > 1 ? `, ↓ ${rest}` : ""}`;
    this.devices.before(element("p", { class: "axes" }, axes));
    this.devices.style.gridTemplateColumns = `repeat(${columns}, minmax(0, ${columns > 16 ? "1fr" : "44px"}))`;
    const order = across ? [...Array(others * last).keys()].map((place) => (place % others) * last + Math.floor(place / others)) : [...Array(others * last).keys()];
    this.buttons = [];
    for (const device of order) {
      const button = element("button", { type: "button", role: "radio", tabindex: -1 }, columns > 24 ? "" : String(device));
      button.addEventListener("click", () => this.choose(device));
      button.addEventListener("keydown", (event) => this.key(event, order, device, columns));
      this.buttons[device] = button;
      this.devices.append(button);
    }
  }

  key(event, order, device, columns) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    const next = order[order.indexOf(device) + by];
    if (by === undefined || next === undefined) return;
    event.preventDefault();
    this.choose(next);
    this.buttons[next].focus();
  }

  // For every dim the ranges that a device holds.
  held(device) {
    const place = this.coordinate(device);
    return this.weight.dims.map(({ axes, ranges }) => {
      const number = axes.reduce((n, axis) => n * this.view.mesh.sizes[axis] + place[axis], 0);
      return this.view.ranges[ranges][number];
    });
  }

  show() {
    this.weight = this.view.weights[Number(this.select.value)];
    const slices = this.buttons.map((_, device) => JSON.stringify(this.held(device)));
    const different = [...new Set(slices)];
    this.same = slices.map((slice) => slices.filter((other) => other === slice).length);
    this.buttons.forEach((button, device) => {
      const hue = different.length > 1 ? (320 * different.indexOf(slices[device])) / different.length : 210;
      button.style.background = `hsl(${hue} 55% 36%)`;
      const place = this.coordinate(device).map((n, i) => `${this.view.mesh.names[i]} = ${n}`).join(", ");
      button.setAttribute("aria-label", `device ${device}, ${place}, slice ${different.indexOf(slices[device]) + 1} of ${different.length}`);
      button.title = `device ${device}: ${place}`;
    });
    this.choose(this.device);
  }

  choose(device) {
    this.device = device;
    this.buttons.forEach((button, i) => {
      button.setAttribute("aria-checked", String(i === device));
      button.tabIndex = i === device ? 0 : -1;
    });
    const held = this.held(device);
    const length = (ranges) => ranges.reduce((sum, [start, stop]) => sum + stop - start, 0);
    const words = held.map((ranges, dim) => (length(ranges) === this.weight.shape[dim] ? `all ${this.weight.shape[dim]} of dim ${dim}` : `${ranges.map(([start, stop]) => `${start} to ${stop - 1}`).join(" and ")} of dim ${dim}`));
    const part = held.map((ranges, dim) => length(ranges) / this.weight.shape[dim]).reduce((a, b) => a * b, 1);
    const place = this.coordinate(device).map((n, i) => `${this.view.mesh.names[i]} = ${n}`).join(", ");
    const others = this.same[device] - 1;
    const shared = others ? `; ${others === 1 ? "one other device holds" : `${others} other devices hold`} the same` : "";
    this.text.textContent = `Device ${device} (${place}) holds ${words.join(", ")}: ${(100 * part).toPrecision(3)}% of the weight${shared}.`;
    this.draw(held);
  }

  // The first two dims as a rectangle.
  draw(held) {
    const [rows, columns] = [this.weight.shape[0], this.weight.shape[1] ?? 1];
    const ratio = Math.min(4, Math.max(0.12, rows / Math.max(columns, rows / 40)));
    const width = ratio > 1 ? 260 / ratio : 420;
    const height = Math.max(24, Math.min(260, width * ratio));
    const svg = drawn("svg", { width: width + 2, height: height + 2, viewBox: `-1 -1 ${width + 2} ${height + 2}`, "aria-hidden": "true" }, drawn("rect", { class: "whole", width, height }));
    for (const [top, bottom] of held[0]) {
      for (const [left, right] of held[1] ?? [[0, 1]]) {
        svg.append(drawn("rect", { class: "held", x: (left / columns) * width, y: (top / rows) * height, width: ((right - left) / columns) * width, height: ((bottom - top) / rows) * height }));
      }
    }
    this.drawing.replaceChildren(svg);
  }
}
