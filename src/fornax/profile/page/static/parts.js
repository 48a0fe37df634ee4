// Parts that several views use: keys of colours, links between views, drawings that follow their width.

import { go } from "fornax/address.js";
import { h, replace } from "fornax/dom.js";
import { CLASSES, operations } from "profile/model.js";

// A drawing that is made again whenever its width changes: `draw(width)` gives a node. Returns {element, again, end}.
export function sized(draw) {
  const element = h("div");
  let width = 0;
  const watch = new ResizeObserver(() => {
    if (element.clientWidth === width || element.clientWidth === 0) return;
    width = element.clientWidth;
    replace(element, draw(width));
  });
  watch.observe(element);
  return { element, again: () => width && replace(element, draw(width)), end: () => watch.disconnect() };
}

// A legend of names and theme colours: {name: colour}.
export function legend(colours) {
  return h(
    "div",
    { class: "legend" },
    Object.entries(colours).map(([name, colour]) =>
      h("span", {}, h("span", { class: "key", style: { background: `var(--${colour})` } }), name),
    ),
  );
}

// A legend of those classes of operations that ran.
export function classLegend() {
  const ran = new Set(operations.filter((each) => each.seconds > 0).map((each) => each.category));
  return legend(Object.fromEntries(Object.entries(CLASSES).filter(([name]) => ran.has(name))));
}

// A button that goes to another view.
export function link(text, view, values, kind = "link") {
  return h("button", { type: "button", class: kind, on: { click: () => go(view, values) } }, text);
}

// Buttons to the other views of an operation.
export function operationLinks(operation, here) {
  const query = { operation: operation.index };
  return h(
    "div",
    { class: "bar" },
    here === "operations" ? null : link("In the table", "operations", query, null),
    here === "timeline" ? null : link("On the time line", "timeline", query, null),
    here === "graph" ? null : link("In the graph", "graph", query, null),
  );
}

// A section that says why there is nothing to show.
export function nothing(text) {
  return h("section", {}, h("p", { class: "lead" }, text));
}

export const NO_OPERATIONS = "No operation of a device is in the capture.";

// A labelled choice.
export function choice(label, entries, value, changed) {
  const select = h(
    "select",
    { "aria-label": label },
    entries.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)),
  );
  select.addEventListener("change", () => changed(select.value));
  return h("label", {}, `${label} `, select);
}

// Decades of ten between two values, for log axes.
export function decades(low, high) {
  const out = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) out.push(10 ** power);
  return out;
}
