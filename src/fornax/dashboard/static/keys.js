// Keys: those of every view and those that a view adds; `?` lists them.

import { go } from "fornax/address.js";
import { h, typing } from "fornax/dom.js";
import { dialog } from "dashboard/parts.js";

const EVERYWHERE = [
  { key: "?", text: "this list", run: () => showKeys() },
  { key: "/", text: "to the search field", run: () => document.querySelector("[data-search]")?.focus() },
  { key: "r", text: "list of runs", run: () => go("runs") },
  { key: "Escape", text: "leave a field", run: () => document.activeElement?.blur?.() },
];
let here = [];

/** Set the keys of the view that is shown: [{key, text, run}]. */
export function keysOf(list) {
  here = list;
}

/** Begin to listen. */
export function listenToKeys() {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (typing(event) && event.key !== "Escape") return;
    const found = [...here, ...EVERYWHERE].find((each) => [each.key].flat().includes(event.key));
    if (!found || event.defaultPrevented) return;
    event.preventDefault();
    found.run(event);
  });
}

/** The list of keys, in a dialog. */
export function showKeys() {
  const rows = (list) => list.map((each) => [h("dt", {}, [each.key].flat().map((key) => h("kbd", {}, key))), h("dd", {}, each.text)]);
  const chart = [["+ −", "zoom"], ["0", "the whole"], ["← →", "move the cursor, with shift by ten"]];
  const inTable = [["↑ ↓", "from row to row"], ["Enter", "open"]];
  return dialog("Keys", (close) => [
    h("h2", {}, "Keys"),
    h("dl", { class: "keys" }, rows(here), rows(EVERYWHERE)),
    h("h3", {}, "In a chart that has the focus"),
    h("dl", { class: "keys" }, rows(chart.map(([key, text]) => ({ key, text })))),
    h("h3", {}, "In a table"),
    h("dl", { class: "keys" }, rows(inTable.map(([key, text]) => ({ key, text })))),
    h("p", {}, h("button", { type: "button", autofocus: true, on: { click: () => close(null) } }, "Close")),
  ]);
}
