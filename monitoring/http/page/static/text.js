// How things are written: elements without any markup from outside, and numbers as people read them.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Text goes in as text only, so nothing that a run says can become markup. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Set text only where it differs: screen readers and selections stay undisturbed. */
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (value) => (isNumber(value) ? grouped.format(value) : "–");

export function compact(value) {
  if (!isNumber(value)) return "–";
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return `${brief(value / (letter === "k" ? 1e3 : size))}${letter}`;
  }
  return Math.abs(value) < 100 ? brief(value) : grouped.format(value);
}

export const percent = (share, digits = 1) => (isNumber(share) ? `${(100 * share).toFixed(digits)} %` : "–");

export function seconds(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 120) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (size >= 1) return `${trim(value, digits)} s`;
  if (size >= 1e-3) return `${trim(value * 1e3, digits)} ms`;
  return `${trim(value * 1e6, digits)} µs`;
}

export function duration(value) {
  if (!isNumber(value) || value < 0) return "–";
  const [h, m, s] = [Math.floor(value / 3600), Math.floor((value % 3600) / 60), Math.floor(value % 60)];
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${s} s` : `${s} s`;
}

export function bytes(value) {
  if (!isNumber(value)) return "–";
  for (const [power, name] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]]) {
    if (value >= 2 ** power) return `${trim(value / 2 ** power, 3)} ${name}`;
  }
  return `${value} B`;
}

/** So many significant digits, never 1.2e+3. */
export function trim(value, digits = 4) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2));
  return value.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size))));
}

/** The same without zeros at the end, as axes and settings have it. */
export function brief(value, digits = 3) {
  if (!isNumber(value) || Math.abs(value) < 1e-12) return isNumber(value) ? "0" : "–";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(Math.max(digits, Math.floor(Math.log10(size)) + 1))));
}

export const words = (name) => String(name).replaceAll("_", " ");

/** The time of day where it is looked at. */
export function clock(time) {
  return isNumber(time) ? new Date(1000 * time).toLocaleTimeString("en-GB") : "";
}

export function rankName(rank) {
  const at = rank.coords;
  return at ? `rank ${rank.rank} (dp=${at.dp} tp=${at.tp} pp=${at.pp})` : `rank ${rank.rank}`;
}

/** Of any number of values: Math.max takes them as arguments, of which a browser has room for some ten thousand. */
export const largest = (values, least = 0) => values.reduce((most, value) => Math.max(most, value), least);

export const sum = (values) => values.reduce((total, value) => total + (isNumber(value) ? value : 0), 0);
