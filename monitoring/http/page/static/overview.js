// The top of the page: the run's name and state, its key numbers, and the table of parts.

import { quantile } from "./series.js";
import { brief, bytes, byId, compact, count, duration, el, isNumber, percent, seconds, sum, trim, write } from "./text.js";

const RECENT = 20; // steps that `last steps` means

export class Overview {
  #numbers = new Map();
  #rows = new Map();

  constructor(meanings, steps, cursor, onBright) {
    Object.assign(this, { meanings, steps, cursor });
    this.#buildParts(onBright);
    cursor.listen(() => this.drawParts());
  }

  draw(state) {
    this.state = state;
    this.#drawTop(state.run, state.totals);
    this.#drawNumbers(state.run, state.totals, state.ranks);
    this.drawParts();
  }

  // The top.

  #drawTop(run, totals) {
    write(byId("run-id"), run.run_id ?? "");
    const status = byId("status");
    status.className = `pill ${cssName(run.status)}`;
    write(status, String(run.status));
    const mesh = run.mesh ?? {};
    const facts = [
      ["", run.model, isNumber(run.parameters) && run.parameters ? `${compact(run.parameters)} parameters` : ""],
      ["", `${count(run.world_size)} ranks`, `dp ${mesh.dp} × tp ${mesh.tp} × pp ${mesh.pp}`],
      ["", run.schedule, `${count(run.microbatches)} microbatch${run.microbatches === 1 ? "" : "es"}`],
    ];
    byId("facts").replaceChildren(...facts.map(([, name, more]) => el("li", {}, el("b", {}, String(name ?? "")), more ? ` ${more}` : "")));
    const bar = byId("progress");
    bar.className = `progress ${cssName(run.status)}`;
    bar.setAttribute("aria-valuemax", String(run.steps || 1));
    bar.setAttribute("aria-valuenow", String(totals.steps));
    bar.firstElementChild.style.width = `${run.steps ? Math.min(100, (100 * totals.steps) / run.steps) : 0}%`;
    const loss = isNumber(totals.final_loss) ? ` · loss ${trim(totals.final_loss)}` : "";
    document.title = `${run.status === "running" ? "" : `${run.status}: `}step ${totals.steps}${run.steps ? `/${run.steps}` : ""}${loss} · ${run.run_id}`;
    this.#drawError(run.error);
  }

  #drawError(error) {
    byId("error").hidden = !error;
    if (!error) return;
    const found = typeof error === "string" ? { message: error } : error;
    write(byId("error-message"), found.message ?? "");
    byId("error-trace").hidden = !found.traceback;
    write(byId("error-trace").querySelector("pre"), found.traceback ?? "");
  }

  // Key numbers.

  #drawNumbers(run, totals, ranks) {
    const last = this.steps.last;
    const recent = this.steps.inView().slice(-200).map((step) => step.seconds);
    const shares = this.#shareOfRun();
    const lost = Object.entries(shares).filter(([name]) => name !== "compute").sort((a, b) => b[1] - a[1])[0];
    const memory = ranks.map((rank) => rank.memory_bytes).filter(isNumber);
    const left = run.status === "running" && run.steps > totals.steps && isNumber(totals.step_seconds) ? (run.steps - totals.steps) * totals.step_seconds : null;
    this.#number("steps", "steps", totals.steps, count(totals.steps), run.steps ? `/ ${count(run.steps)}` : "", left !== null ? `${duration(left)} left` : run.status);
    this.#number("loss", "loss", totals.final_loss, isNumber(totals.final_loss) ? trim(totals.final_loss, 5) : "–", "", last ? `norm ${brief(last.grad_norm)} · rate ${brief(last.learning_rate)}` : "");
    this.#number("tokens_per_second", "throughput", totals.tokens_per_second, compact(totals.tokens_per_second), "tokens/s", last && last.seconds > 0 ? `now ${compact(last.tokens / last.seconds)}` : "");
    this.#number("step_seconds", "step time", totals.step_seconds, ...split(seconds(totals.step_seconds)), recent.length ? `median ${seconds(quantile(recent, 0.5))} · p95 ${seconds(quantile(recent, 0.95))}` : "");
    this.#number("compute", "compute share", shares.compute, ...split(percent(shares.compute)), lost && lost[1] > 0 ? `next ${lost[0]} ${percent(lost[1])}` : "");
    if (isNumber(totals.mfu)) this.#number("mfu", "MFU", totals.mfu, ...split(percent(totals.mfu)), "of what the devices could");
    this.#number("memory", "memory", sum(memory), ...split(memory.length ? bytes(sum(memory)) : "–"), memory.length ? `most in a rank ${bytes(Math.max(...memory))}` : "");
  }

  #number(id, name, raw, text, unit, sub) {
    if (!this.#numbers.has(id)) {
      const parts = { value: document.createTextNode(""), unit: el("span", { class: "unit" }), sub: el("p", { class: "sub" }) };
      const dd = el("dd", { id: `number-${id}` }, parts.value, " ", parts.unit);
      this.#numbers.set(id, { ...parts, dd });
      byId("numbers").append(el("div", {}, el("dt", {}, name), dd, parts.sub));
    }
    const made = this.#numbers.get(id);
    made.dd.dataset.value = String(raw);
    write(made.value, text);
    write(made.unit, unit);
    write(made.sub, sub ?? "");
    made.sub.title = sub ?? "";
  }

  // Parts.

  #buildParts(onBright) {
    const rows = Object.entries(this.meanings).map(([name, meaning]) => {
      const swatch = el("i", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = `var(--part-${name})`;
      const meter = el("i");
      meter.style.background = `var(--part-${name})`;
      const cells = { now: el("td", { "data-part": name }), run: el("td"), step: el("td"), meter };
      const row = el("tr", { onpointerenter: () => onBright(name), onpointerleave: () => onBright(null) },
        el("td", { class: "name", title: meaning }, swatch, name), el("td", { class: "meaning" }, meaning),
        cells.now, el("td", { class: "meter-cell" }, el("span", { class: "meter", "aria-hidden": "true" }, meter)), cells.run, cells.step);
      this.#rows.set(name, { ...cells, row });
      return row;
    });
    this.rest = { run: el("td"), step: el("td") };
    const rest = el("tr", { class: "rest" }, el("td", { class: "name" }, "unattributed"), el("td", { class: "meaning" }, "what the parts leave of the step"), el("td"), el("td"), this.rest.run, this.rest.step);
    byId("parts").tBodies[0].replaceChildren(...rows, rest);
  }

  drawParts() {
    if (!this.state) return;
    const chosen = this.cursor.step === null ? null : this.steps.nearest(this.cursor.step);
    const looked = chosen ? (chosen.parts ? [chosen] : []) : this.steps.latestWithParts(RECENT);
    const now = shares(means(looked, Object.keys(this.meanings)));
    const run = this.#shareOfRun();
    const step = this.state.totals.step_seconds;
    const at = chosen ? `step ${chosen.step}${isNumber(chosen.seconds) ? `, ${seconds(chosen.seconds)}` : ""}` : looked.length ? `mean of the ranks` : "";
    write(byId("time-at"), at);
    write(byId("parts-now"), chosen ? `step ${chosen.step}` : looked.length ? `last ${looked.length}` : "now");
    for (const [name, cells] of this.#rows) {
      write(cells.now, looked.length ? percent(now[name]) : "–");
      write(cells.run, percent(run[name]));
      write(cells.step, isNumber(step) && isNumber(run[name]) ? seconds(run[name] * step) : "–");
      cells.meter.style.width = `${100 * ((looked.length ? now[name] : run[name]) || 0)}%`;
      cells.row.classList.toggle("none", !(now[name] >= 0.0005 || run[name] >= 0.0005));
    }
    const rest = sum(this.state.ranks.map((rank) => Math.abs(rank.remainder_seconds ?? 0)));
    const all = sum(this.state.ranks.flatMap((rank) => Object.values(rank.seconds ?? {})));
    write(this.rest.run, all ? percent(rest / all) : "–");
    write(this.rest.step, all && isNumber(step) ? seconds((rest / all) * step, 2) : "–");
  }

  /** Of all counted steps of all ranks. */
  #shareOfRun() {
    const each = this.state.ranks.map((rank) => rank.seconds ?? {});
    return shares(Object.fromEntries(Object.keys(this.meanings).map((name) => [name, sum(each.map((parts) => parts[name]))])));
  }
}

function means(steps, names) {
  return Object.fromEntries(names.map((name) => [name, sum(steps.map((step) => step.parts[name])) / (steps.length || 1)]));
}

function shares(parts) {
  const total = sum(Object.values(parts));
  return Object.fromEntries(Object.entries(parts).map(([name, value]) => [name, total > 0 ? value / total : null]));
}

/** A number and its unit. */
function split(text) {
  const at = text.indexOf(" ");
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

const cssName = (status) => String(status).replaceAll(/[^a-z]/g, "");
