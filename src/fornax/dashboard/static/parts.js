// Pieces that several views are made of.

import { h } from "fornax/dom.js";
import { seconds } from "fornax/format.js";
import { table } from "fornax/table.js";

/** A labelled select. `options`: [value, text] pairs. */
export function choice(label, value, options, changed) {
  const select = h("select", { on: { change: () => changed(select.value) } },
    options.map(([each, text]) => h("option", { value: each, selected: each === value }, text)));
  return h("label", { class: "field" }, h("span", {}, label), select);
}

/** A labelled check box. */
export function check(label, value, changed) {
  const box = h("input", { type: "checkbox", checked: value, on: { change: () => changed(box.checked) } });
  return h("label", { class: "field" }, box, h("span", {}, label));
}

/** A field for a regular expression, which says below itself what is wrong with it. */
export function searchField(label, value, wrong, changed) {
  const said = h("span", { class: "bad", role: "status" }, wrong);
  const input = h("input", { type: "search", value, placeholder: label, "aria-label": label, spellcheck: "false", "data-search": true,
    "aria-invalid": wrong ? "true" : null });
  input.addEventListener("input", () => {
    said.textContent = changed(input.value);
    input.setAttribute("aria-invalid", said.textContent !== "");
  });
  return h("span", { class: "field" }, input, said);
}

/** A section with its heading. */
export function section(title, ...children) {
  return h("section", {}, h("h2", {}, title), children);
}

/** A table that sorts, without a filter. Columns as of `fornax/table.js`. */
export function grid(caption, columns, rows) {
  return table({ caption, columns, rows, key: (row) => rows.indexOf(row), filterLabel: null }).element;
}

/** What is said where there is nothing to show. */
export function nothing(text) {
  return h("p", { class: "lead" }, text);
}

/** How long ago a time was, given in seconds since 1970. */
export function ago(time) {
  if (time === null || time === undefined) return "";
  const passed = Date.now() / 1000 - time;
  return passed < 5 ? "now" : `${seconds(Math.round(passed))} ago`;
}

/** A run's status: a word and a mark, so that no colour says it alone. */
export function statusMark(status) {
  const [mark, look] = { running: ["▶", "good"], finished: ["✓", "soft"], stopped: ["■", "warn"], failed: ["✗", "bad"] }[status] ?? ["·", "soft"];
  return h("span", { class: `status ${look}` }, h("span", { "aria-hidden": "true" }, mark + " "), status);
}

/** Alerts in full: what happened and what to do. */
export function alertList(alerts) {
  return h("ul", { class: "alerts" }, alerts.map((each) => h("li", { class: each.level },
    h("b", {}, each.kind, each.step === null || each.step === undefined ? "" : ` at step ${each.step.toLocaleString("en-US")}`), " ",
    each.message, each.fix ? h("span", { class: "soft" }, " · ", each.fix) : null)));
}

/** Runs `work` soon, at most once in that many milliseconds. */
export function calm(work, milliseconds) {
  let timer = null, before = 0;
  const soon = () => {
    if (timer !== null) return;
    timer = setTimeout(() => { timer = null; before = performance.now(); work(); }, Math.max(0, before + milliseconds - performance.now()));
  };
  soon.stop = () => clearTimeout(timer);
  return soon;
}

let toast = null;

/** Says something to screen readers and, for a while, in the corner. */
export function announce(text) {
  toast ??= document.body.appendChild(h("div", { class: "toast", role: "status" }));
  toast.textContent = text;
  toast.classList.add("shown");
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => toast.classList.remove("shown"), 5000);
}

/** A dialog; `build(close)` gives its content. Resolves with what `close` is given, null when it is dismissed. */
export function dialog(label, build) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    const box = h("dialog", { "aria-label": label });
    const close = (value) => {
      box.returned = value;
      box.close();
    };
    box.addEventListener("close", () => {
      box.remove();
      before?.focus?.();
      resolve(box.returned ?? null);
    });
    box.append(...build(close));
    document.body.append(box);
    box.showModal();
  });
}
