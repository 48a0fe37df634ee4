// The page of a profile: header, tabs, keys.

import { h } from "fornax/dom.js";
import { moment, seconds, NONE } from "fornax/format.js";
import { tabs } from "fornax/tabs.js";
import { themeSwitch } from "fornax/theme.js";
import { compared } from "profile/compared.js";
import { flame } from "profile/flame.js";
import { graph } from "profile/graph.js";
import { host } from "profile/host.js";
import { memory } from "profile/memory.js";
import { data } from "profile/model.js";
import { operationsView } from "profile/operations.js";
import { overview } from "profile/overview.js";
import { ranks } from "profile/ranks.js";
import { roofline } from "profile/roofline.js";
import { serving } from "profile/serving.js";
import { timeline } from "profile/timeline.js";

const KEYS = [
  ["1 … 9", "views in their order"],
  ["/", "the view's search or filter"],
  ["↑ ↓ Enter", "walk through a table's rows, choose one"],
  ["W S", "time line: zoom in and out (also the wheel)"],
  ["A D", "time line: earlier and later (also drag)"],
  ["F", "time line: fit the chosen event"],
  ["← →", "time line: the event before and after"],
  ["N P", "time line: next and previous match"],
  ["+ − Esc", "charts: zoom in, out, all"],
  ["arrows, Enter, Esc", "flame graph: walk, zoom in, zoom out"],
];

const views = [
  { id: "overview", label: "Overview", draw: overview },
  { id: "operations", label: "Operations", draw: operationsView },
  { id: "flame", label: "Flame graph", draw: flame },
  { id: "roofline", label: "Roofline", draw: roofline },
  { id: "memory", label: "Memory", draw: memory },
  { id: "timeline", label: "Time line", draw: timeline },
  { id: "graph", label: "Graph", draw: graph },
  { id: "host", label: "Host and input", draw: host },
];
if (data.serving.requests.length || data.serving.batches.length)
  views.splice(1, 0, { id: "serving", label: "Requests", draw: serving });
if (data.info.ranks.length > 1) views.push({ id: "ranks", label: "Ranks", draw: ranks });
if (data.compared) views.unshift({ id: "compared", label: "Comparison", draw: compared });

function help() {
  const close = h("button", { type: "button" }, "Close");
  const dialog = h(
    "dialog",
    { "aria-label": "Keys" },
    h("h2", {}, "Keys"),
    h(
      "table",
      {},
      h(
        "tbody",
        {},
        KEYS.map(([key, what]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, what))),
      ),
    ),
    close,
  );
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function header() {
  const { info } = data;
  const versions = Object.entries(info.versions)
    .map(([name, version]) => `${name} ${version}`)
    .join(", ");
  const hosts = info.hosts.length > 3 ? `${info.hosts.length} hosts` : info.hosts.join(", ");
  const said = [
    `${info.devices} × ${info.device_kind || info.platform}`,
    hosts,
    moment(info.begin),
    `${seconds(info.seconds)} captured`,
    versions,
  ];
  return h(
    "header",
    {},
    h(
      "div",
      {},
      h("h1", {}, `Profile ${info.folder}`),
      h("p", { class: "sub" }, said.filter((each) => each && each !== NONE).join(" · ")),
    ),
    h(
      "div",
      { class: "bar" },
      h("button", { type: "button", on: { click: help } }, "Keys ", h("kbd", {}, "?")),
      themeSwitch(),
    ),
  );
}

function keys(made) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target instanceof Element && event.target.closest("input, select, textarea")) return;
    if (event.key === "?") help();
    else if (event.key === "/") {
      const search = made.elements[1].querySelector("input[type=search]");
      if (!search) return;
      event.preventDefault();
      search.focus();
    } else if (/^[1-9]$/.test(event.key) && views[event.key - 1]) {
      document.getElementById(`tab-${views[event.key - 1].id}`).click();
    }
  });
}

const made = tabs(views, "Views of the profile");
document.getElementById("page").append(header(), ...made.elements);
keys(made);
made.show();
