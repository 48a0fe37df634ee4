// The list of runs: filter, sort, group, pins, a selection to compare, and curves as small as a word.

import { go, keep } from "fornax/address.js";
import { h, replace, s } from "fornax/dom.js";
import { number } from "fornax/format.js";
import { table } from "fornax/table.js";
import { href, joined, list, pattern } from "dashboard/address.js";
import { ago, announce, calm, choice, nothing, searchField, statusMark } from "dashboard/parts.js";
import { exported, follow, get, linkTo, series } from "dashboard/source.js";

const USUAL = ["loss", "eval/loss", "reward", "tokens_per_second"];
const PINS = "fornax-pins";

/** The view. Its address: `filter`, `sort` (`-name` descends), `group`, `columns`, `runs` (selected). */
export async function runsView(root, { values, signal, end, keys, connection }) {
  const answer = await get("/api/runs", signal);
  const held = new Map(answer.runs.map((run) => [run.id, run]));
  const state = {
    filter: values.filter ?? "", group: values.group ?? "", selected: new Set(list(values.runs)), pins: storedPins(),
    columns: values.columns === undefined ? null : list(values.columns),
    sort: { key: (values.sort ?? "-updated").replace(/^-/, ""), descending: (values.sort ?? "-updated").startsWith("-") },
  };
  const sparks = sparkLines(held, signal, end);
  let last = [];

  const picked = h("span", { class: "soft", role: "status" });
  const compare = h("button", { type: "button", on: { click: () => compareSelected() } });
  const count = h("span", { class: "soft", role: "status" });
  const settings = h("span", { class: "bar" });
  const grid = table({
    caption: "Runs", columns: [], rows: [], key: (run) => run.id, filterLabel: null, sort: state.sort,
    choose: (run) => go("run", { id: run.id }),
    changed: ({ sort }) => { state.sort = sort; keep({ sort: (sort.descending ? "-" : "") + sort.key }); },
  });
  const save = exported ? null : h("a", { class: "button", href: linkTo("/export", {}), download: "runs.html", title: "The runs as one HTML file" }, "Export");
  replace(root,
    h("h1", {}, "Runs"),
    answer.truncated ? h("p", { class: "notice" }, "There are more runs below this folder than are listed; start `fornax ui` on a part of it.") : null,
    h("div", { class: "bar" },
      searchField("filter: name, kind, status, or key=value of the config", state.filter, pattern(state.filter).wrong, (text) => {
        state.filter = text;
        keep({ filter: text });
        draw();
        return pattern(text).wrong;
      }), count, settings, h("span", { class: "spread bar" }, picked, compare, save)),
    h("section", { class: "list" }, grid.element));
  grid.element.addEventListener("keydown", (event) => {
    const id = event.target.closest("tr")?.querySelector("[data-run]")?.dataset.run;
    if (!id || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "x") select(id);
    else if (event.key === "p") pin(id);
    else return;
    event.preventDefault();
  });

  function compareSelected() {
    if (state.selected.size) go("compare", { runs: joined([...state.selected]) });
    else announce("Select runs first: the boxes of the list, or x on a row.");
  }

  function select(id) {
    if (!state.selected.delete(id)) state.selected.add(id);
    keep({ runs: joined([...state.selected]) });
    draw();
  }

  function pin(id) {
    if (!state.pins.delete(id)) state.pins.add(id);
    keepPins(state.pins);
    draw();
  }

  function matching() {
    const found = pattern(state.filter);
    const newest = [...held.values()].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0));
    return newest.filter((run) => found.test([run.id, run.kind, run.method, run.status].join(" "))
      || (state.filter.includes("=") && Object.entries(run.config).some(([key, value]) => found.test(`${key}=${value}`))));
  }

  function draw() {
    const rows = matching();
    const names = [...new Set([...held.values()].flatMap((run) => Object.keys(run.metrics)))].sort();
    const config = differing([...held.values()]);
    if (last.join() !== [...names, ...config].join()) {
      last = [...names, ...config];
      replace(settings,
        choice("group by", state.group, [["", "nothing"], ...["kind", "status", "group", ...config].map((each) => [each, each === "group" ? "folder" : each])], (value) => {
          state.group = value;
          keep({ group: value });
          draw();
        }),
        columnChoice(names, config, () => shownColumns(names), (columns) => {
          state.columns = columns;
          keep({ columns: joined(columns) || "none" });
          draw();
        }));
    }
    const chosen = shownColumns(names);
    count.textContent = state.filter ? `${rows.length} of ${held.size}` : `${held.size} ${held.size === 1 ? "run" : "runs"}`;
    picked.textContent = state.selected.size ? `${state.selected.size} selected` : "";
    compare.textContent = state.selected.size > 1 ? `Compare ${state.selected.size}` : "Compare";
    compare.disabled = state.selected.size === 0;
    const focus = document.activeElement?.dataset?.keep;
    grid.set({ rows, columns: columns(chosen, state, sparks, select, pin), groups: groups(rows, state), sort: state.sort });
    if (focus) grid.element.querySelector(`[data-keep="${CSS.escape(focus)}"]`)?.focus();
    sparks.watch(grid.element);
  }

  function shownColumns(names) {
    return state.columns ? state.columns.filter((each) => each !== "none") : USUAL.filter((each) => names.includes(each));
  }

  keys([
    { key: "c", text: "compare what is selected", run: compareSelected },
    { key: "x", text: "select the row that has the focus", run: () => {} },
    { key: "p", text: "pin the row that has the focus", run: () => {} },
    { key: ["j", "k"], text: "to the next or last row", run: (event) => step(grid.element, event.key) },
  ]);
  draw();
  if (!held.size) root.append(nothing("No runs yet. A run directory has a config.yaml or a metrics.jsonl; they appear here by themselves."));

  const redraw = calm(draw, 400);
  end(follow([], null, {
    run: ({ run }) => { held.set(run.id, { config: {}, ...held.get(run.id), ...run }); sparks.old(run.id); redraw(); },
    runs: async () => {
      const now = await get("/api/runs", signal).catch(() => null);
      if (!now) return;
      held.clear();
      for (const run of now.runs) held.set(run.id, run);
      redraw();
    },
  }, connection));
  end(redraw.stop);
}

function step(element, key) {
  const rows = [...element.querySelectorAll("tbody tr.choice")];
  const at = rows.indexOf(document.activeElement?.closest("tr"));
  const next = rows[Math.min(rows.length - 1, Math.max(0, at + (key === "j" ? 1 : -1)))];
  if (next) { next.tabIndex = 0; next.focus(); }
}

/** The config keys in which runs differ. */
export function differing(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  return keys.filter((key) => new Set(runs.map((run) => JSON.stringify(run.config[key]))).size > 1).sort();
}

function columns(chosen, state, sparks, select, pin) {
  const toggle = (run, on, role, label, mark, act) => h("button", { type: "button", class: "plain toggle", role, "data-keep": `${role} ${run.id}`,
    "aria-label": `${label} ${run.id}`, [role === "checkbox" ? "aria-checked" : "aria-pressed"]: String(on), on: { click: () => act(run.id) } }, mark);
  const metric = (name) => ({ key: name, label: name, value: (run) => run.metrics[name] ?? run.config[name] ?? null, show: (run, value) =>
    (typeof value === "number" ? number(value) : String(value ?? "")) });
  const narrow = matchMedia("(max-width: 600px)").matches;
  const steps = (run) => (run.step === null ? "" : number(run.step) + (run.steps ? ` / ${number(run.steps)}` : ""));
  const status = (run) => h("span", {}, statusMark(run.status), run.alerts.length ? badge(run.alerts) : null);
  const marks = { key: "selected", label: "✓", help: "selected", value: (run) => Number(state.selected.has(run.id)), text: true, show: (run, on) => h("span", { class: "marks" },
    toggle(run, on === 1, "checkbox", "select", on ? "☑" : "☐", select),
    toggle(run, state.pins.has(run.id), "button", "pin", state.pins.has(run.id) ? "★" : "☆", pin)) };
  const name = { key: "id", label: "run", value: (run) => run.id, text: true, wide: true, show: (run) => h("span", {},
    h("a", { href: href("run", { id: run.id }), "data-run": run.id, "data-keep": `run ${run.id}` }, run.id),
    narrow ? h("span", { class: "under" }, status(run), h("span", { class: "soft" }, ` ${steps(run)} `,
      chosen.filter((each) => typeof run.metrics[each] === "number").slice(0, 1).map((each) => `${each} ${number(run.metrics[each])}`))) : null) };
  if (narrow) return [marks, name];
  return [
    marks, name,
    { key: "status", label: "status", value: (run) => run.status, text: true, show: status },
    { key: "updated", label: "updated", value: (run) => run.updated, text: true, show: (run) => ago(run.updated) },
    { key: "kind", label: "kind", value: (run) => run.method ?? run.kind, text: true },
    { key: "step", label: "step", value: (run) => run.step, show: steps },
    { key: "spark", label: "curve", help: "reward, or else loss, by step", value: () => null, show: (run) => sparks.of(run) },
    ...chosen.map(metric),
  ];
}

function badge(alerts) {
  const level = alerts.some((each) => each.level === "error") ? "bad" : "warn";
  return h("span", { class: `badge ${level}`, title: alerts.map((each) => each.message).join("\n") },
    `⚠ ${alerts[0].kind}${alerts.length > 1 ? ` +${alerts.length - 1}` : ""}`);
}

function groups(rows, state) {
  const pinned = "pinned";
  const name = (run) => {
    const value = state.group in run && typeof run[state.group] !== "object" ? run[state.group] : run.config[state.group];
    return `${state.group} = ${value === undefined || value === null || value === "" ? "none" : value}`;
  };
  if (!state.group && !rows.some((run) => state.pins.has(run.id))) return null;
  const of = (run) => (state.pins.has(run.id) ? pinned : state.group ? name(run) : "others");
  const labels = [...new Set(rows.map(of))].filter((each) => each !== pinned).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  return { of, labels: [pinned, ...labels] };
}

function columnChoice(names, config, now, changed) {
  const boxes = (title, list) => (list.length ? h("fieldset", {}, h("legend", {}, title), list.map((name) => {
    const box = h("input", { type: "checkbox", checked: now().includes(name) });
    box.addEventListener("change", () => changed(box.checked ? [...now(), name] : now().filter((each) => each !== name)));
    return h("label", { class: "field" }, box, h("span", {}, name));
  })) : null);
  return h("details", { class: "menu" }, h("summary", {}, "columns"), h("div", { class: "menu-body" }, boxes("last values", names), boxes("config", config)));
}

function storedPins() {
  try {
    const found = JSON.parse(localStorage.getItem(PINS) ?? "[]");
    return new Set(Array.isArray(found) ? found.filter((each) => typeof each === "string") : []);
  } catch {
    return new Set();
  }
}

function keepPins(pins) {
  try {
    localStorage.setItem(PINS, JSON.stringify([...pins]));
  } catch {
    announce("This browser keeps nothing for files: the pin lasts until the page is closed.");
  }
}

/** Small curves of the rows in sight, asked for a few runs at a time. */
function sparkLines(held, signal, end) {
  const known = new Map(), waiting = new Set(), old = new Set();
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const id = entry.target.dataset.spark;
      if (entry.isIntersecting && (!known.has(id) || old.has(id))) waiting.add(id);
    }
    ask();
  });
  const nameOf = (run) => ["reward", "loss", "eval/loss"].find((name) => name in run.metrics) ?? null;
  const ask = calm(async () => {
    const runs = [...waiting].map((id) => held.get(id)).filter((run) => run && nameOf(run));
    waiting.clear();
    for (const name of new Set(runs.map(nameOf))) {
      const ids = runs.filter((run) => nameOf(run) === name).map((run) => run.id);
      for (let at = 0; at < ids.length; at += 25) {
        const found = await series(ids.slice(at, at + 25), name, { x: "step", points: 40 }, signal).catch(() => []);
        for (const each of found) {
          known.set(each.run, each);
          old.delete(each.run);
          for (const host of document.querySelectorAll(`[data-spark="${CSS.escape(each.run)}"]`)) host.replaceChildren(line(each));
        }
      }
    }
  }, 100);
  end(() => { seen.disconnect(); ask.stop(); });
  return {
    of: (run) => h("span", { class: "spark", "data-spark": run.id }, known.has(run.id) ? line(known.get(run.id)) : null),
    old: (id) => old.add(id),
    watch: (element) => {
      seen.disconnect();
      for (const host of element.querySelectorAll("[data-spark]")) seen.observe(host);
    },
  };
}

function line({ x, y, name }) {
  const points = x.map((each, i) => [each, y[i]]).filter(([, value]) => value !== null);
  const [low, high] = [Math.min(...points.map((each) => each[1])), Math.max(...points.map((each) => each[1]))];
  const [from, to] = [x[0], x.at(-1)];
  const place = ([a, b]) => `${(2 + (96 * (a - from)) / (to - from || 1)).toFixed(1)},${(22 - (20 * (b - low)) / (high - low || 1)).toFixed(1)}`;
  return s("svg", { viewBox: "0 0 100 24", role: "img", "aria-label": `${name} from ${number(points[0]?.[1])} to ${number(points.at(-1)?.[1])}` },
    s("polyline", { points: points.map(place).join(" ") }));
}
