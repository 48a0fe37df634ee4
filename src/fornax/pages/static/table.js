// A table that sorts by any column, filters by a regular expression, and is walked through by keyboard.

import { h, replace } from "fornax/dom.js";
import { NONE } from "fornax/format.js";

const PAGE = 200;

// A table over `rows`.
//   caption: what it holds, for screen readers.
//   columns: [{key, label, value, show, text, help}]: `value(row)` sorts, `show(row, value)` gives a node or text of the cell
//     (the value itself when left out), `text: true` aligns left and is what the filter looks through, `wide` cuts long text, whose whole is its tooltip, `help` is a tooltip.
//   before: a control next to the filter.
//   key(row): what tells rows apart; sort: {key, descending}; filter: text; filterLabel: null leaves the field out.
//   groups: {of, labels}: rows are under a line of their group `of(row)`, in the order of `labels`; `set` takes it too.
//   choose(row): called by a click or Enter on a row; changed({sort, filter}): called when the reader changes either.
// Returns {element, set({rows, columns, chosen}), shown()}.
export function table({ caption, columns, rows, key, sort, filter = "", filterLabel = "Filter (regular expression)", before = null, choose, changed, groups = null }) {
  let state = { rows, columns, sort: sort ?? null, filter, limit: PAGE, chosen: null, focus: 0, groups };
  const search = h("input", { type: "search", placeholder: "filter: regular expression", "aria-label": filterLabel ?? "", value: filter, spellcheck: "false" });
  const said = h("span", { class: "soft", role: "status" });
  const head = h("tr");
  const body = h("tbody");
  const more = h("button", { type: "button", on: { click: () => { state.limit += 1000; draw(); } } });
  const grid = h("table", { class: "grid" }, h("caption", { class: "hidden-text" }, caption), h("thead", {}, head), body);
  const scroll = h("div", { class: "scroll rows", role: "region", "aria-label": caption, tabindex: "0" }, grid);
  const element = h("div", {}, filterLabel === null ? null : h("div", { class: "bar" }, before, search, said), scroll, more);
  let shown = [];
  let lines = []; // of the body: a row, or null where a group's name stands

  search.addEventListener("input", () => {
    state = { ...state, filter: search.value, limit: PAGE, focus: 0 };
    draw();
    changed?.({ sort: state.sort, filter: state.filter });
  });
  body.addEventListener("click", (event) => {
    if (event.target.closest("button, a")) return;
    const at = event.target.closest("tr")?.sectionRowIndex;
    if (choose && at !== undefined && lines[at]) pick(at);
  });
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    if (event.target !== row) return;
    const at = row.sectionRowIndex;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      pick(at);
      return;
    }
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: body.rows.length - 1, PageDown: at + 10, PageUp: at - 10 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const step = to < at ? -1 : 1;
    let next = Math.min(Math.max(to, 0), body.rows.length - 1);
    while (lines[next] === null) next += step;
    if (lines[next]) focus(next);
  });

  function focus(at) {
    if (body.rows[state.focus]) body.rows[state.focus].tabIndex = -1;
    state.focus = at;
    body.rows[at].tabIndex = 0;
    body.rows[at].focus();
  }

  function pick(at) {
    if (!choose) return;
    state.chosen = key(lines[at]);
    mark();
    choose(lines[at]);
  }

  function mark() {
    for (const row of body.rows) {
      const held = lines[row.sectionRowIndex];
      if (choose && held) row.setAttribute("aria-selected", key(held) === state.chosen);
    }
  }

  function matching() {
    if (!state.filter) return { rows: state.rows, wrong: null };
    try {
      const expression = new RegExp(state.filter, "i");
      const texts = state.columns.filter((column) => column.text);
      return { rows: state.rows.filter((row) => texts.some((column) => expression.test(String(column.value(row) ?? "")))), wrong: null };
    } catch (error) {
      return { rows: state.rows, wrong: error.message };
    }
  }

  function sorted(found) {
    const column = state.columns.find((each) => each.key === state.sort?.key);
    if (!column) return found;
    const sign = state.sort.descending ? -1 : 1;
    return [...found].sort((a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      const [noX, noY] = [x === null || x === undefined || x !== x, y === null || y === undefined || y !== y];
      if (noX || noY) return noX - noY; // unknown ones last, whatever the direction
      return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    });
  }

  function grouped(found) {
    if (!state.groups) return found;
    const { of, labels } = state.groups;
    const members = new Map(labels.map((label) => [label, []]));
    for (const row of found) members.get(of(row)).push(row);
    return [...members.values()].flat();
  }

  // The lines of the body: rows, and before each group's first row its name.
  function drawn() {
    lines = [];
    const elements = [];
    let group = null;
    for (const row of shown.slice(0, state.limit)) {
      const name = state.groups?.of(row) ?? null;
      if (name !== group) {
        group = name;
        lines.push(null);
        const size = shown.filter((each) => state.groups.of(each) === name).length;
        elements.push(h("tr", { class: "group" }, h("th", { scope: "rowgroup", colspan: state.columns.length }, `${name} (${size})`)));
      }
      lines.push(row);
      elements.push(h("tr", choose ? { class: "choice", tabindex: "-1" } : {}, state.columns.map((column) => cell(column, row))));
    }
    return elements;
  }

  function header(column) {
    const at = state.sort?.key === column.key ? (state.sort.descending ? "descending" : "ascending") : null;
    const arrow = at === "descending" ? " ↓" : at === "ascending" ? " ↑" : "";
    const button = h("button", { type: "button", title: column.help }, column.label, h("span", { "aria-hidden": "true" }, arrow));
    button.addEventListener("click", () => {
      const descending = state.sort?.key === column.key ? !state.sort.descending : !column.text;
      state.sort = { key: column.key, descending };
      draw();
      head.cells[state.columns.indexOf(column)].querySelector("button").focus();
      changed?.({ sort: state.sort, filter: state.filter });
    });
    return h("th", { class: column.text ? null : "n", scope: "col", "aria-sort": at }, button);
  }

  function cell(column, row) {
    const value = column.value(row);
    const content = column.show ? column.show(row, value) : (value ?? NONE);
    return h("td", { class: column.text ? (column.wide ? "t wide" : "t") : "n", title: column.wide ? value : null }, content instanceof Node ? content : String(content));
  }

  function draw() {
    const { rows: found, wrong } = matching();
    shown = grouped(sorted(found));
    search.setAttribute("aria-invalid", wrong !== null);
    said.textContent = wrong ?? (state.filter ? `${shown.length} of ${state.rows.length}` : "");
    replace(head, state.columns.map(header));
    const held = body.contains(document.activeElement) && document.activeElement.matches("tr");
    replace(body, drawn());
    if (!lines[state.focus]) state.focus = Math.max(0, lines.findLastIndex((row, index) => row && index < state.focus), lines.findIndex(Boolean));
    if (choose && body.rows[state.focus]) body.rows[state.focus].tabIndex = 0;
    if (shown.length === 0) replace(body, h("tr", {}, h("td", { colspan: state.columns.length, class: "soft" }, state.filter ? "nothing matches" : "nothing here")));
    else mark();
    if (held) body.rows[state.focus]?.focus();
    more.hidden = shown.length <= state.limit;
    more.textContent = `Show more (${shown.length - state.limit} left)`;
  }

  draw();
  return {
    element,
    shown: () => shown,
    set(changes) {
      state = { ...state, ...changes };
      const at = "chosen" in changes ? shown.findIndex((row) => key(row) === state.chosen) : -1;
      if (at >= state.limit) state.limit = at + 1;
      draw();
      if (at >= 0) body.rows[at]?.scrollIntoView({ block: "nearest" });
    },
  };
}

// A cell with a share of one as a bar beside its text.
export function shareCell(share, text) {
  const width = Math.max(0, Math.min(1, share || 0)) * 100;
  return h("span", { class: "shared" }, h("span", { class: "share", "aria-hidden": "true" }, h("i", { style: { width: `${width}%` } })), h("b", {}, text));
}
