// Numbers for people, and elements.
"use strict";

const NOTHING = 5e-9; // seconds: what rounds to nothing is nothing
const TIME = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];

function scaled(value, units) {
  if (!value) return "0";
  const [factor, name] = units.find(([f]) => Math.abs(value) >= f * 0.9995) ?? units.at(-1);
  const number = value / factor;
  const digits = String(Math.trunc(Math.abs(number) + 0.0005)).length;
  return `${number.toFixed(name === "B" ? 0 : Math.max(0, 3 - digits))} ${name}`;
}

const seconds = (value) => (Math.abs(value) < NOTHING ? "0" : scaled(value, TIME));
const nbytes = (value) => scaled(value, BYTES);
const shape = (sizes) => sizes.join(" × ") || "scalar";
const many = (value, what) => `${value} ${what}${value === 1 ? "" : "s"}`;

function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

// What a state along one axis means.
function stateWords(state) {
  if (state === "R") return "whole";
  if (state === "B") return "whole, its gradient still to be added up";
  if (state === "P") return "partial sums, still to be added up";
  const [dim, tiling] = state.slice(2, -1).split("|");
  return `dim ${dim} split${tiling && /[x+]/.test(tiling) ? " part by part" : ""}`;
}

// "dim 0 split over x, y": axes that do the same belong together.
function layoutWords(layout, axes) {
  const by = new Map();
  layout.forEach((state, i) => by.set(state, [...(by.get(state) ?? []), axes[i]]));
  const split = [...by].filter(([state]) => state !== "R");
  return split.map(([state, names]) => `${stateWords(state)} (${names.join(", ")})`).join("; ") || "whole";
}
