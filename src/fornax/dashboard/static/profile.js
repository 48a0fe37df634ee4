// Captures of a run: their list, the page of one, and two compared.

import { h, replace } from "fornax/dom.js";
import { bytes, count, moment } from "fornax/format.js";
import { href } from "dashboard/address.js";
import { choice, grid, nothing, section } from "dashboard/parts.js";
import { exported, get, partOf } from "dashboard/source.js";

/** The tab. Its address: `capture`; `before` (of `before_run`) to compare it with. */
export async function profileView(root, context) {
  const { id, values, signal } = context;
  if (values.capture !== undefined && !exported) await opened(root, id, values, signal);
  else await listed(root, context);
}

async function listed(root, { id, run: first, signal, follow }) {
  const place = h("div"), comparison = h("div");
  replace(root, place, comparison);
  const draw = (run) => replace(place, section("Captures",
    nothing(exported ? "Their pages are not in this file." : "A capture opens with where its steps' time went, operations beside their bounds, memory and the time line. It is read when it is opened, which takes some seconds."),
    grid("captures", [
      { key: "name", label: "capture", value: (each) => each.name, text: true, show: (each) => (exported ? shown(each.name) : h("a", { href: href("run", { id, tab: "profile", capture: each.name }) }, shown(each.name))) },
      { key: "ranks", label: "processes", value: (each) => each.ranks, show: (each, value) => count(value) },
      { key: "bytes", label: "size", value: (each) => each.bytes, show: (each, value) => bytes(value) },
      { key: "modified", label: "made", value: (each) => each.modified, show: (each) => moment(each.modified), text: true }], run.profiles)));
  draw(first);
  if (!exported) await chooser(comparison, id, first, signal);
  follow(["profile"], async () => draw(await get(partOf(id), signal)));
}

/** A capture's name without the folders that all have. */
function shown(name) {
  return name === "." ? "profile" : name.replace(/(^|\/)plugins\/profile\//, "$1");
}

/** What is compared: a capture of this run with one of any run. */
async function chooser(root, id, run, signal) {
  const { runs } = await get("/api/runs", signal);
  const state = { before_run: id, before: run.profiles[1]?.name ?? run.profiles[0].name, capture: run.profiles[0].name };
  const beside = h("span"), link = h("a", { class: "button" }, "Compare");
  const options = (profiles) => profiles.map((each) => [each.name, shown(each.name)]);
  const changed = () => { link.href = href("run", { id, tab: "profile", ...state }); };
  const show = (profiles) => replace(beside, profiles.length ? choice("before", state.before, options(profiles), (value) => { state.before = value; changed(); }) : "It has no captures.");
  const other = async (value) => {
    const { profiles } = await get(partOf(value), signal);
    Object.assign(state, { before_run: value, before: profiles[0]?.name ?? null });
    show(profiles);
    link.hidden = !profiles.length;
    changed();
  };
  show(run.profiles);
  changed();
  replace(root, section("Compare", nothing("What got slower, by how much, from which line. 30 steps or more each are good, 6 the least."),
    h("div", { class: "bar" }, choice("run before", id, runs.map((each) => [each.id, each.id]), other), beside,
      choice("after", state.capture, options(run.profiles), (value) => { state.capture = value; changed(); }), link)));
}

async function opened(root, id, { capture, before, before_run }, signal) {
  const title = before === undefined ? shown(capture)
    : `${before_run && before_run !== id ? before_run + ": " : ""}${shown(before)} → ${shown(capture)}`;
  const state = h("p", { class: "lead", role: "status" }, "Reading: some seconds, longer for a large capture.");
  const bar = h("div", { class: "bar" }, h("a", { href: href("run", { id, tab: "profile" }) }, "← all captures"), h("h2", {}, title));
  replace(root, bar, state);
  const asked = Object.entries({ run: id, capture, before, before_run }).filter(([, value]) => value !== undefined);
  let page;
  try {
    ({ page } = await get("/api/profile?" + new URLSearchParams(asked), signal));
  } catch (error) {
    if (error.status === undefined) throw error;
    replace(state, error.message);
    state.setAttribute("role", "alert");
    return;
  }
  bar.append(h("a", { class: "button spread", href: page, target: "_blank", rel: "noopener" }, "In a tab of its own"));
  state.replaceWith(h("iframe", { class: "capture", src: page, title: `Profile ${title}` }));
}
