// One run: what it is and how it goes, then a tab for each kind of file that it has.

import { h, replace } from "fornax/dom.js";
import { moment, number, percent, seconds, si } from "fornax/format.js";
import { href } from "dashboard/address.js";
import { controls } from "dashboard/control.js";
import { curves } from "dashboard/curves.js";
import { dataView } from "dashboard/data.js";
import { configView, eventsView, filesView } from "dashboard/files.js";
import { goodputView } from "dashboard/goodput.js";
import { imagesView } from "dashboard/images.js";
import { memoryView } from "dashboard/memory.js";
import { ago, alertList, calm, statusMark } from "dashboard/parts.js";
import { profileView } from "dashboard/profile.js";
import { quantizationView } from "dashboard/quantization.js";
import { samplesView } from "dashboard/samples.js";
import { serverView } from "dashboard/server.js";
import { Refused, exported, follow, get, linkTo, partOf, settled } from "dashboard/source.js";

const has = (...names) => (run) => names.some((name) => run.files.some((file) => file.name === name) || run.folders.includes(name));

/** By tab: its label, when it is there, its view. */
const TABS = {
  curves: ["Curves", () => true, curvesTab],
  goodput: ["Goodput", has("goodput.jsonl"), goodputView],
  samples: ["Samples", has("samples.jsonl"), samplesView],
  images: ["Images", has("images", "samples"), imagesView],
  profile: ["Profile", (run) => run.profiles.length > 0, profileView],
  memory: ["Memory", (run) => run.plan !== null || has("program.json", "plan.json")(run), memoryView],
  server: ["Server", has("server.jsonl"), serverView],
  data: ["Data", (run) => Object.keys(run.config).some((key) => key.startsWith("data")), dataView],
  quantization: ["Quantization", (run) => run.kind === "quantize", quantizationView],
  events: ["Events", () => true, eventsView],
  files: ["Files", () => true, filesView],
  config: ["Config", (run) => run.config_text !== "", configView],
};

/** The view. Its address: `id`, `tab`, and what the tab keeps. */
export async function runView(root, context) {
  const { values, signal, end, connection } = context;
  const id = values.id ?? "";
  const { runs, truncated } = await get("/api/runs", signal);
  if (!truncated && !runs.some((each) => each.id === id)) throw new Refused(404, `There is no run “${id}” here; it may have been moved or deleted.`);
  let run = await get(partOf(id), signal);
  const about = exported ? { control: false } : await get("/api/about", signal);
  document.title = `${run.name} · Fornax`;
  const top = h("div");
  const body = h("div", { class: "tab-body" });
  const there = Object.entries(TABS).filter(([, [, present]]) => present(run));
  const tab = there.some(([name]) => name === values.tab) ? values.tab : usual(run, there);
  const asked = values.tab && values.tab !== tab;
  replace(root, top,
    h("nav", { class: "tabs", "aria-label": "Parts of the run" }, there.map(([name, [label]]) =>
      h("a", { href: href("run", { id, tab: name }), "aria-current": name === tab ? "page" : null }, label))),
    asked ? h("p", { class: "notice", role: "alert" }, `This run has no “${values.tab}”.`) : null, body);
  const buttons = about.control ? controls(id) : null;
  const head = () => replace(top, heading(run), buttons);
  head();

  const heard = { lines: [], reset: [], complete: [], changed: [] };
  const on = (event, handler) => heard[event].push(handler);
  const offsets = { wait: () => null };
  const again = calm(async () => {
    const now = await get(partOf(id), signal).catch(() => null);
    if (!now) return;
    run = now;
    head();
  }, 1000);
  end(again.stop);
  await TABS[tab][2](body, { ...context, id, run, on, offsets,
    follow: (files, redo) => on("changed", ({ files: changed }) => {
      if (changed.some((name) => files.some((each) => name.startsWith(each)))) redo().catch(() => {});
    }) });
  if (signal.aborted) return;
  await settled(() => tab !== "curves" || offsets.wait(), signal);
  const tell = (event) => (data) => { for (const handler of heard[event]) handler(data); };
  end(follow([id], offsets.wait() && [offsets.wait()], {
    ...Object.fromEntries(Object.keys(heard).map((event) => [event, tell(event)])),
    run: ({ run: now }) => { run = { ...run, ...now }; head(); again(); },
  }, connection));
}

/** What is shown when the address names no tab. */
function usual(run, there) {
  const own = { serve: "server", host: "server", quantize: "quantization" }[run.kind];
  return there.some(([name]) => name === own) ? own : "curves";
}

async function curvesTab(body, context) {
  const drawn = await curves(body, [context.run], context);
  context.offsets.wait = () => drawn.offsets.get(context.run.id) ?? null;
  context.on("lines", ({ run, records }) => drawn.lines(run, records));
  context.on("reset", () => drawn.reload());
  context.on("complete", () => drawn.reload());
}

function heading(run) {
  const figures = [
    [run.steps ? `of ${number(run.steps)} steps` : "steps", run.step === null ? null : number(run.step)],
    ...["loss", "eval/loss", "reward"].map((name) => [name, run.metrics[name] === undefined ? null : number(run.metrics[name])]),
    ["tokens/s", run.metrics.tokens_per_second ? si(run.metrics.tokens_per_second) : null],
    ["a step", run.measured?.step_seconds ? seconds(run.measured.step_seconds) : null],
    ["of the device's peak FLOP/s", run.measured?.mfu ? percent(run.measured.mfu) : null],
  ].filter(([, value]) => value !== null);
  return [
    h("div", { class: "bar" }, h("h1", {}, run.id), statusMark(run.status),
      h("span", { class: "soft" }, [run.method ?? run.kind, run.hosts > 1 ? `${run.hosts} hosts` : null,
        run.started ? `started ${moment(run.started)}` : null, run.updated ? `last line ${ago(run.updated)}` : null].filter(Boolean).join(" · ")),
      h("span", { class: "spread bar" }, h("a", { class: "button", href: href("compare", { runs: run.id }) }, "Compare"),
        exported ? null : h("a", { class: "button", href: linkTo("/export", { run: run.id }), download: `${run.name}.html` }, "Export"))),
    figures.length ? h("div", { class: "figures" }, figures.map(([label, value]) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, label)))) : null,
    run.alerts.length ? alertList(run.alerts) : null,
    run.skipped && run.skipped.junk + run.skipped.huge > 0
      ? h("p", { class: "notice" }, `${run.skipped.junk + run.skipped.huge} lines of metrics.jsonl cannot be read and are left out.`) : null,
  ];
}
