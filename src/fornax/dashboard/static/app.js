// The page: its frame, the view that the address names, keys, and the state of the connection.

import { onChange, read } from "fornax/address.js";
import { h, hideCard, replace } from "fornax/dom.js";
import { moment } from "fornax/format.js";
import { themeSwitch } from "fornax/theme.js";
import { href } from "dashboard/address.js";
import { compareView } from "dashboard/compare.js";
import { askForToken } from "dashboard/control.js";
import { keysOf, listenToKeys, showKeys } from "dashboard/keys.js";
import { runView } from "dashboard/run.js";
import { runsView } from "dashboard/runs.js";
import { exported, useToken } from "dashboard/source.js";

const VIEWS = { "": runsView, runs: runsView, compare: compareView, run: runView };
const TITLES = { "": "Runs", runs: "Runs", compare: "Compare", run: "Run" };

function takeToken() {
  const given = /[#&]token=([^&]*)/.exec(location.hash);
  if (given) history.replaceState(null, "", "#runs");
  useToken(given ? decodeURIComponent(given[1]) : "", askForToken);
}

function frame() {
  const state = h("span", { class: "state soft", role: "status" }, exported ? `exported ${moment(exported)}` : "");
  const view = h("div", { id: "view", tabindex: "-1" });
  const tools = h("span", { class: "tools" }, themeSwitch(),
    h("button", { type: "button", "aria-label": "Keys", title: "Keys (?)", on: { click: showKeys } }, "?"));
  const links = { runs: h("a", { href: href("runs") }, "Runs"), compare: h("a", { href: href("compare") }, "Compare") };
  replace(document.getElementById("page"),
    h("a", { class: "skip", href: "#", on: { click: (event) => { event.preventDefault(); view.focus(); } } }, "Skip to the content"),
    h("header", { class: "top" }, h("a", { class: "brand", href: href("runs") }, "Fornax"),
      h("nav", { "aria-label": "Views" }, Object.values(links)), state, tools),
    view);
  return { view, state, links };
}

let ending = () => {};

async function show({ view, state, links }) {
  ending();
  hideCard();
  const { view: name, values } = read();
  const control = new AbortController();
  const ends = [];
  ending = () => {
    control.abort();
    for (const end of ends.splice(0)) end();
  };
  const context = {
    values,
    signal: control.signal,
    end: (each) => (control.signal.aborted ? each() : ends.push(each)),
    keys: (list) => keysOf(list),
    connection: (text) => {
      state.textContent = { live: "live", lost: "reconnecting…" }[text];
      state.className = `state ${text}`;
    },
  };
  keysOf([]);
  delete view.dataset.drawn;
  for (const [each, link] of Object.entries(links)) {
    if (each === (name || "runs")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${TITLES[name] ?? "Fornax"} · Fornax`;
  const draw = Object.hasOwn(VIEWS, name) ? VIEWS[name] : null;
  if (!draw) {
    replace(view, h("h1", {}, "No such view"), h("p", { class: "lead" }, `The address names “${name}”; `, h("a", { href: href("runs") }, "go to the list of runs"), "."));
    view.dataset.drawn = "";
    return;
  }
  try {
    await draw(view, context);
  } catch (error) {
    if (error.name === "AbortError" || control.signal.aborted) return;
    refused(view, error);
  }
  if (!control.signal.aborted) view.dataset.drawn = "";
}

function refused(view, error) {
  replace(view, h("h1", {}, error.status === 404 ? "Not found" : "Nothing to show"), h("p", { class: "lead", role: "alert" }, error.message),
    h("p", {}, h("a", { href: href("runs") }, "To the list of runs"), " ",
      h("button", { type: "button", on: { click: () => dispatchEvent(new HashChangeEvent("hashchange")) } }, "Try again")));
  if (error.status === undefined) throw error;
}

takeToken();
const parts = frame();
listenToKeys();
onChange(() => show(parts));
show(parts);
