// The log's tail: newest last, by level and by words; it follows unless somebody scrolls up.

import { brief, byId, clock, el, isNumber, write } from "./text.js";

const MOST = 1000;
const LEVELS = { debug: 0, info: 1, warning: 2, error: 3, critical: 4 };
const OWN = new Set(["time", "timestamp", "level", "event", "message", "rank", "coords", "step", "kind"]);

export class Log {
  #lines = [];
  #fresh = [];

  constructor() {
    this.host = byId("log");
    byId("log-level").addEventListener("change", () => this.#all());
    byId("log-filter").addEventListener("input", () => this.#all());
  }

  replace(lines) {
    this.#lines = lines.slice(-MOST);
    this.#all();
  }

  put(line) {
    this.#lines.push(line);
    this.#fresh.push(line);
    if (this.#lines.length > MOST) this.#lines.shift();
  }

  /** What came since, at most once a frame. */
  draw() {
    if (!this.#fresh.length) return;
    const follows = this.#follows();
    if (!this.#lines.length || this.host.querySelector(".empty")) this.host.replaceChildren();
    this.host.append(...this.#fresh.filter((line) => this.#wanted(line)).map(row));
    this.#fresh = [];
    while (this.host.childElementCount > MOST) this.host.firstChild.remove();
    this.#end(follows);
  }

  #all() {
    this.#fresh = [];
    const wanted = this.#lines.filter((line) => this.#wanted(line));
    this.host.replaceChildren(...(wanted.length ? wanted.map(row) : [el("p", { class: "empty" }, this.#lines.length ? "no line is like that" : "nothing was logged yet")]));
    this.#end(true);
  }

  #end(follows) {
    if (follows) this.host.scrollTop = this.host.scrollHeight;
    write(byId("log-count"), this.#lines.length ? `last ${this.#lines.length} lines` : "");
  }

  #follows() {
    return this.host.scrollHeight - this.host.scrollTop - this.host.clientHeight < 24;
  }

  #wanted(line) {
    const level = LEVELS[String(line.level ?? "info").toLowerCase()] ?? 1;
    const sought = byId("log-filter").value.trim().toLowerCase();
    return level >= LEVELS[byId("log-level").value] && (!sought || JSON.stringify(line).toLowerCase().includes(sought));
  }
}

function row(line) {
  const level = String(line.level ?? "info").toLowerCase();
  const where = [line.rank !== undefined && line.rank !== null ? `r${line.rank}` : "", line.step !== undefined && line.step !== null ? `#${line.step}` : ""].filter(Boolean).join(" ");
  const more = Object.entries(line).filter(([name]) => !OWN.has(name)).map(([name, value]) => ` ${name}=${plain(value)}`).join("");
  const time = typeof line.time === "number" ? clock(line.time) : String(line.time ?? line.timestamp ?? "").slice(11, 19);
  const known = Object.hasOwn(LEVELS, level) ? level : "info";
  return el("div", { class: `is-${known}` },
    el("time", {}, time), el("span", { class: "level" }, known), el("span", { class: "where", title: line.coords ? JSON.stringify(line.coords) : null }, where),
    el("span", { class: "text" }, String(line.event ?? line.message ?? ""), el("span", { class: "more" }, more)));
}

function plain(value) {
  if (isNumber(value)) return Number.isInteger(value) ? String(value) : brief(value, 4);
  return typeof value === "string" ? value : JSON.stringify(value);
}
