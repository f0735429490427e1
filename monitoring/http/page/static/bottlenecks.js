// Bottlenecks as cards: how bad, what shows it, what to change, and what that would gain.

import { brief, bytes, byId, el, isNumber, percent, seconds, words, write } from "./text.js";

const ORDER = ["critical", "high", "medium", "low"];

/** `pipeline.microbatches`, `8` as YAML to put into the run's file. */
export function asYaml(key, value) {
  const names = key.split(".");
  return names.map((name, depth) => `${"  ".repeat(depth)}${name}:${depth === names.length - 1 ? ` ${value}` : ""}`).join("\n");
}

export class Bottlenecks {
  #shown = "";

  draw(found, run, steps) {
    const text = JSON.stringify([found, run.status === "running", steps > 0]);
    if (text === this.#shown) return; // a button that is about to be pressed stays
    this.#shown = text;
    const sorted = [...found].sort((a, b) => ORDER.indexOf(a.severity) - ORDER.indexOf(b.severity) || (b.gain ?? 0) - (a.gain ?? 0));
    write(byId("bottlenecks-count"), sorted.length ? String(sorted.length) : "");
    const none = steps > 0 ? "None found: nothing in the latest steps costs more than it should." : "They are looked for once steps are made.";
    byId("bottlenecks").replaceChildren(...(sorted.length ? sorted.map(card) : [el("p", { class: "calm" }, none)]));
  }
}

function card(found) {
  const severity = ORDER.includes(found.severity) ? found.severity : "low";
  const where = [found.axis && `axis ${found.axis}`, isNumber(found.rank) && `rank ${found.rank}`, found.host && `host ${found.host}`].filter(Boolean).join(", ");
  return el("article", { class: `card ${severity}`, "data-kind": found.kind },
    el("div", { class: "head" },
      el("h3", {}, words(found.kind)), el("span", { class: `severity ${severity}` }, severity), el("span", { class: "space" }), el("span", { class: "unit" }, where)),
    el("p", {}, found.message),
    el("ul", { class: "evidence", "aria-label": "evidence" }, Object.entries(found.evidence ?? {}).map(([name, value]) =>
      el("li", {}, `${words(name)} `, el("b", {}, typeof value === "number" ? evidence(name, value) : String(value))))),
    el("p", { class: "remedy" }, found.remedy, isNumber(found.gain) ? el("span", { class: "gain" }, ` Would save about ${percent(found.gain, found.gain < 0.095 ? 1 : 0)} of a step.`) : null),
    found.key ? yaml(found) : null);
}

/** A number in the unit that its name ends with. */
function evidence(name, value) {
  if (/(share|ratio|efficiency|utili[sz]ation|percentile)$/.test(name) && Math.abs(value) <= 1) return percent(value);
  if (/seconds$/.test(name)) return seconds(value);
  if (/bytes$|^memory|budget$/.test(name)) return bytes(value);
  return Number.isInteger(value) ? String(value) : brief(value);
}

function yaml(found) {
  const known = found.value !== null && found.value !== undefined;
  if (!known) return el("pre", { class: "yaml" }, found.key);
  const text = asYaml(found.key, found.value);
  const button = el("button", { type: "button", "aria-label": `copy the YAML of ${words(found.kind)}` }, "copy");
  button.addEventListener("click", async () => {
    write(button, (await copied(text)) ? "copied" : "select it");
    setTimeout(() => write(button, "copy"), 1500);
  });
  return el("pre", { class: "yaml" }, el("code", {}, text), button);
}

/** Browsers give the clipboard to pages of this machine or over TLS only. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
