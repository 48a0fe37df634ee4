// What a model wrote, beside its rewards: by step, by order, by keyboard, and runs side by side.

import { keep } from "fornax/address.js";
import { h, replace } from "fornax/dom.js";
import { count, number } from "fornax/format.js";
import { joined, list, numberOf, oneOf, pattern } from "dashboard/address.js";
import { choice, nothing, searchField } from "dashboard/parts.js";
import { exported, get, partOf } from "dashboard/source.js";

const ORDERS = {
  drawn: ["as drawn", () => 0],
  "-reward": ["highest reward", (a, b) => (b.reward ?? 0) - (a.reward ?? 0)],
  reward: ["lowest reward", (a, b) => (a.reward ?? 0) - (b.reward ?? 0)],
  "-advantage": ["highest advantage", (a, b) => (b.advantage ?? 0) - (a.advantage ?? 0)],
  "-tokens": ["longest", (a, b) => (b.tokens ?? 0) - (a.tokens ?? 0)],
};
const COLOURS = { none: "none", logprobs: "log-probability", advantages: "advantage" };
const ENDS = { stop: "ended by itself", length: "truncated" };
const PAGE = 20, MOST_PANES = 4, MOST = 200;

/** The tab. Its address: `panes` (`run@step`, of which the first is this run), `sample`, `order`, `colour`, `search`. */
export async function samplesView(root, { id, values, signal, keys, follow }) {
  const state = { at: Math.max(0, numberOf(values.sample, 0)), order: oneOf(values.order, Object.keys(ORDERS)), colour: oneOf(values.colour, Object.keys(COLOURS)), search: values.search ?? "" };
  const asked = list(values.panes).map(paneOf).filter((pane) => pane.run);
  const panes = (asked.length ? asked : [{ run: id, step: null }]).slice(0, MOST_PANES);
  const columns = h("div", { class: "panes" });
  const place = h("span", { class: "soft", role: "status" });
  const bar = h("div", { class: "bar" });
  replace(root, bar, columns);
  const runs = (await get("/api/runs", signal)).runs.map((run) => run.id);
  await Promise.all(panes.map((pane) => load(pane)));

  async function load(pane, step = pane.step) {
    if (!runs.includes(pane.run)) {
      Object.assign(pane, { answer: null, error: `There is no run “${pane.run}” here.` });
      return;
    }
    try {
      const asked = { ...(step === null ? {} : { step }), ...(exported ? {} : { limit: MOST }) };
      pane.answer = await get(partOf(pane.run, "samples", asked), signal);
      pane.error = null;
      pane.step = pane.answer.step;
    } catch (error) {
      if (signal.aborted) throw error;
      pane.error = error.message;
    }
  }

  function shown(pane) {
    const found = pattern(state.search);
    return (pane.answer?.samples ?? []).filter((each) => found.test(`${each.prompt}\n${each.completion}`)).sort(ORDERS[state.order][1]);
  }

  function remember() {
    keep({ panes: joined(panes.map((pane) => (pane.step === null ? pane.run : `${pane.run}@${pane.step}`))), sample: state.at || null,
      order: state.order === "drawn" ? null : state.order, colour: state.colour === "none" ? null : state.colour, search: state.search });
  }

  function draw() {
    const lists = panes.map(shown);
    const longest = Math.max(...lists.map((each) => each.length));
    state.at = Math.min(state.at, Math.max(0, longest - 1));
    place.textContent = longest ? `sample ${state.at + 1} of ${longest}` : "";
    replace(columns, panes.map((pane, i) => column(pane, i, lists)));
    remember();
  }

  function column(pane, i, lists) {
    const steps = pane.answer?.steps ?? [];
    const at = steps.indexOf(pane.step);
    const go = (to) => async () => { if (steps[to] !== undefined) { await load(pane, steps[to]); draw(); } };
    const head = h("div", { class: "bar" },
      panes.length > 1 || runs.length > 1 ? choice(`run ${i + 1}`, pane.run, [...new Set([pane.run, ...runs])].map((each) => [each, each]), async (run) => {
        Object.assign(pane, { run, step: null });
        await load(pane);
        draw();
      }) : null,
      steps.length ? [h("button", { type: "button", "aria-label": "earlier step", disabled: at <= 0, on: { click: go(at - 1) } }, "◀"),
        choice("step", String(pane.step), steps.map((step) => [String(step), number(step)]), async (step) => { await load(pane, Number(step)); draw(); }),
        h("button", { type: "button", "aria-label": "later step", disabled: at >= steps.length - 1, on: { click: go(at + 1) } }, "▶")] : null,
      panes.length > 1 ? h("button", { type: "button", "aria-label": `take column ${i + 1} out`, on: { click: () => { panes.splice(i, 1); draw(); } } }, "×") : null);
    return h("div", { class: "pane" }, head, pane.error ? h("p", { class: "notice", role: "alert" }, pane.error) : content(pane, lists[i], i === 0 ? null : lists[0][state.at]));
  }

  /** The samples of one column from the current one on; beside another run the one of the same prompt. */
  function content(pane, samples, beside) {
    if (!samples.length) return nothing(pane.answer?.samples.length ? "No sample matches." : "No samples yet.");
    const total = pane.answer.total;
    const same = beside ? samples.findIndex((each) => each.prompt === beside.prompt) : -1;
    const from = panes.length > 1 ? (same >= 0 ? same : Math.min(state.at, samples.length - 1)) : Math.floor(state.at / PAGE) * PAGE;
    const some = samples.slice(from, from + (panes.length > 1 ? 1 : PAGE));
    return [
      total > pane.answer.samples.length ? nothing(`${count(pane.answer.samples.length)} of the ${count(total)} samples of this step.`) : null,
      beside && same < 0 ? nothing("Another prompt: this step has no sample of the first column's.") : null,
      some.map((each, i) => card(each, state.colour, panes.length > 1 || from + i === state.at)),
    ];
  }

  const move = (by) => {
    state.at = Math.max(0, state.at + by);
    draw();
    columns.querySelector(".sample.current")?.scrollIntoView({ block: "nearest" });
  };
  const walk = async (by) => {
    await Promise.all(panes.map((pane) => {
      const to = pane.answer?.steps[pane.answer.steps.indexOf(pane.step) + by];
      return to === undefined ? null : load(pane, to);
    }));
    draw();
  };
  replace(bar,
    searchField("text: regular expression", state.search, pattern(state.search).wrong, (text) => { state.search = text; state.at = 0; draw(); return pattern(text).wrong; }),
    choice("order", state.order, Object.entries(ORDERS).map(([key, [label]]) => [key, label]), (value) => { state.order = value; state.at = 0; draw(); }),
    choice("colour of tokens", state.colour, Object.entries(COLOURS), (value) => { state.colour = value; draw(); }),
    h("button", { type: "button", on: { click: async () => {
      if (panes.length >= MOST_PANES) return;
      const pane = { run: panes.at(-1).run, step: panes.at(-1).step };
      panes.push(pane);
      await load(pane);
      draw();
    } } }, "Beside another"), place);
  keys([
    { key: "j", text: "next sample", run: () => move(1) }, { key: "k", text: "last sample", run: () => move(-1) },
    { key: "ArrowRight", text: "later step, in all columns", run: () => walk(1) }, { key: "ArrowLeft", text: "earlier step, in all columns", run: () => walk(-1) },
  ]);
  draw();
  follow(["samples.jsonl"], async () => {
    for (const pane of panes.filter((each) => each.run === id)) {
      const newest = pane.answer && pane.step === pane.answer.steps.at(-1);
      await load(pane, newest ? null : pane.step);
    }
    draw();
  });
}

function paneOf(text) {
  const at = text.lastIndexOf("@");
  const step = at < 0 ? null : numberOf(text.slice(at + 1));
  return step === null ? { run: text, step: null } : { run: text.slice(0, at), step };
}

function card(sample, colour, current) {
  const tags = [
    ["reward", number(sample.reward)],
    ...Object.entries(sample.rewards ?? {}).map(([name, value]) => [name, value === null ? "none" : number(value)]),
    ["advantage", number(sample.advantage)],
    ["tokens", `${number(sample.tokens)}${sample.finish_reason ? `, ${ENDS[sample.finish_reason] ?? sample.finish_reason}` : ""}`],
    ...(sample.status && sample.status !== "ok" ? [["status", sample.status]] : []),
    ...(sample.where ? [["from", sample.where.split("/").at(-1)]] : []),
  ];
  return h("article", { class: "sample" + (current ? " current" : ""), "aria-current": current ? "true" : null },
    h("ul", { class: "tags" }, tags.map(([name, value]) => h("li", {}, h("span", { class: "soft" }, name), " ", value))),
    h("pre", { tabindex: "0" }, h("span", { class: "prompt" }, sample.prompt ?? ""), written(sample, colour)),
    sample.error ? h("p", { class: "bad" }, sample.error) : null,
    sample.cut ? nothing("Cut: the file has all of it.") : null);
}

/** The completion; its tokens have a background colour where the file has a value for each. */
function written(sample, colour) {
  const values = colour === "none" ? null : sample[colour];
  if (!values || !sample.pieces || values.length !== sample.pieces.length) {
    return [h("span", { class: "made" }, sample.completion ?? ""), colour === "none" ? null
      : h("span", { class: "soft" }, `\n(no ${COLOURS[colour]} of tokens in the file)`)];
  }
  const most = Math.max(1e-9, ...values.map((value) => Math.abs(value ?? 0)));
  return h("span", { class: "tokens" }, sample.pieces.map((piece, i) => {
    const share = Math.round((Math.abs(values[i] ?? 0) / most) * 60);
    const name = values[i] < 0 ? "--series-2" : "--series-1";
    return h("span", { title: `${COLOURS[colour]} ${number(values[i])}`, style: { background: `color-mix(in srgb, var(${name}) ${share}%, transparent)` } }, piece);
  }));
}
