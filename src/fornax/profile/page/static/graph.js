// The program around an operation: what it takes and who takes it, two steps each way.

import { go } from "fornax/address.js";
import { h, hideCard, pairs, replace, s, showCard } from "fornax/dom.js";
import { count, percent, seconds } from "fornax/format.js";
import { CLASSES, data, operations } from "profile/model.js";
import { operationFacts } from "profile/operations.js";
import { choice, classLegend, nothing, operationLinks, sized } from "profile/parts.js";

const MOST = 9; // boxes in a layer
const [BOX, ROW] = [46, 92];

// Users of each instruction, by position.
function usersOf(graph) {
  graph.users ??= graph.operands.reduce((users, list, at) => {
    for (const operand of new Set(list)) (users[operand] ??= []).push(at);
    return users;
  }, []);
  return graph.users;
}

function operationOf(program, name) {
  return operations.find((each) => each.program === program && each.name === name) ?? null;
}

// Programs with the time of their operations, the longest first: a program has its name from what was jitted, as others may.
function byTime(programs) {
  const spent = programs.map((each) => [
    each,
    operations.reduce((sum, { program, seconds: time }) => sum + (program === each.at ? time : 0), 0),
  ]);
  return spent.sort((a, b) => b[1] - a[1]);
}

export function graph(panel, values) {
  const known = data.programs.map((each, at) => ({ ...each, at })).filter((each) => each.graph);
  if (known.length === 0) {
    panel.append(nothing("The capture holds no program whose text is understood."));
    return null;
  }
  const asked = operations[values.operation];
  const longest = [...operations]
    .filter((each) => data.programs[each.program]?.graph)
    .sort((a, b) => b.seconds - a.seconds)[0];
  let program =
    asked && data.programs[asked.program]?.graph
      ? asked.program
      : data.programs[values.program]?.graph
        ? Number(values.program)
        : (longest?.program ?? known[0].at);
  const named = values.name ?? (asked ?? longest)?.name;
  const { graph: held } = data.programs[program];
  let centre = held.name.indexOf(named);
  if (centre < 0) centre = Math.max(0, held.name.indexOf(longest?.name));

  const details = h("aside", { class: "details", "aria-live": "polite" });
  const list = h("datalist", { id: "instructions" });
  const field = h("input", {
    type: "search",
    list: "instructions",
    "aria-label": "Instruction",
    value: held.name[centre],
    spellcheck: "false",
  });
  const said = h("span", { class: "soft", role: "status" });
  field.addEventListener("input", () => {
    const text = field.value;
    const found = held.name.filter((name) => name.includes(text)).slice(0, 50);
    replace(
      list,
      found.map((name) => h("option", { value: name })),
    );
    said.textContent = found.length ? "" : "no instruction has this in its name";
    const at = held.name.indexOf(text);
    if (at >= 0 && at !== centre) walk(at, false);
  });
  field.addEventListener("keydown", (event) => {
    const first = held.name.findIndex((name) => name.includes(field.value));
    if (event.key === "Enter" && first >= 0) walk(first, false);
  });

  function walk(at, focus = true) {
    centre = at;
    field.value = held.name[at];
    history.pushState(null, "", `#graph?${new URLSearchParams({ program, name: held.name[at] })}`);
    show();
    if (focus) drawing.element.querySelector(".centre")?.focus();
  }

  function show() {
    drawing.again();
    const each = operationOf(program, held.name[centre]);
    replace(
      details,
      h("h2", { class: "mono" }, held.name[centre]),
      each
        ? [operationFacts(each), operationLinks(each, "graph")]
        : pairs([
            ["opcode", held.opcode[centre]],
            ["shape", held.shape[centre]],
            ["time", "no event of its own"],
          ]),
    );
  }

  const drawing = sized((width) => picture(program, held, centre, width, walk));
  const chooser =
    known.length > 1
      ? choice(
          "Program",
          byTime(known).map(([each, time]) => [each.at, `${each.name}, ${seconds(time)}`]),
          program,
          (value) => go("graph", { program: value }),
        )
      : null;
  panel.append(
    h("section", {}, h("div", { class: "bar" }, chooser, field, list, said), classLegend(), drawing.element, details),
  );
  show();
  return drawing.end;
}

// Layers from two steps before to two steps after the centre: [{at}] or {more} for what is not drawn.
function layersAround(graph, centre) {
  const users = usersOf(graph);
  const seen = new Set([centre]);
  const spread = (from, next) => {
    const found = [];
    for (const at of from)
      for (const to of new Set(next(at) ?? []))
        if (!seen.has(to)) {
          seen.add(to);
          found.push(to);
        }
    return found;
  };
  const weight = (at) => graph.operands[at].length;
  const cut = (list) =>
    list.length > MOST
      ? {
          shown: [...list]
            .sort((a, b) => weight(b) - weight(a))
            .slice(0, MOST - 1)
            .sort((a, b) => a - b),
          more: list.length - MOST + 1,
        }
      : { shown: list, more: 0 };
  const before = cut(spread([centre], (at) => graph.operands[at]));
  const far = cut(spread(before.shown, (at) => graph.operands[at]));
  const after = cut(spread([centre], (at) => users[at]));
  const beyond = cut(spread(after.shown, (at) => users[at]));
  return [far, before, { shown: [centre], more: 0 }, after, beyond];
}

function picture(program, graph, centre, width, walk) {
  const layers = layersAround(graph, centre);
  const most = Math.max(...layers.map(({ shown, more }) => shown.length + (more ? 1 : 0)));
  const wide = Math.max(width, most * 128);
  const labels = ["operands of operands", "operands", "", "users", "users of users"];
  const place = new Map();
  const [boxes, texts] = [[], []];
  const extra = [];
  let y = 20 - ROW;
  layers.forEach(({ shown, more }, level) => {
    if (shown.length === 0) return;
    y += ROW;
    const all = shown.length + (more ? 1 : 0);
    const each = Math.min(210, wide / Math.max(all, 1));
    const from = (wide - each * all) / 2;
    extra.push(s("text", { x: 2, y: y - 6, class: "axis" }, labels[level]));
    for (const [index, at] of shown.entries()) {
      place.set(at, { x: from + (index + 0.5) * each, y });
      boxes.push(box(program, graph, at, from + index * each + 5, y, each - 10, at === centre, walk, texts));
    }
    if (more)
      extra.push(
        s(
          "text",
          { x: from + (all - 0.5) * each, y: y + BOX / 2 + 4, "text-anchor": "middle", class: "axis" },
          `and ${count(more)} more`,
        ),
      );
  });
  const edges = [];
  for (const [at, to] of place) {
    for (const operand of new Set(graph.operands[at])) {
      const from = place.get(operand);
      if (!from || from.y >= to.y) continue;
      const touches = at === centre || operand === centre;
      const [y0, y1] = [from.y + BOX, to.y];
      edges.push(
        s("path", {
          class: touches ? "edge near" : "edge",
          d: `M${from.x},${y0} C${from.x},${y0 + 22} ${to.x},${y1 - 22} ${to.x},${y1}`,
        }),
      );
    }
  }
  const scroll = h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": `Graph around ${graph.name[centre]}` },
    s(
      "svg",
      { width: wide, height: y + BOX + 6, class: "hlo", style: { "max-width": "none" } },
      edges,
      extra,
      boxes,
      s("g", { "aria-hidden": "true", class: "texts" }, texts),
    ),
  );
  requestAnimationFrame(() => {
    scroll.scrollLeft = (wide - width) / 2;
  });
  return scroll;
}

// The box of an instruction; its texts lie above all boxes, for a box has its name from `aria-label`.
function box(program, graph, at, x, y, width, isCentre, walk, texts) {
  const each = operationOf(program, graph.name[at]);
  const room = Math.floor((width - 14) / 6.6);
  const cut = (text) => (text.length > room ? `${text.slice(0, Math.max(1, room - 1))}…` : text);
  const time = each?.seconds ? `${percent(each.share, 2)} · ${seconds(each.seconds)}` : graph.shape[at];
  const made = s(
    "g",
    {
      class: isCentre ? "node centre" : "node",
      role: "button",
      tabindex: "0",
      "aria-label": `${graph.name[at]}, ${graph.opcode[at]}, ${time}`,
    },
    s("rect", { x, y, width, height: BOX, rx: 7 }),
    s("rect", {
      x,
      y: y + 6,
      width: 4,
      height: BOX - 12,
      style: { fill: each ? `var(--${CLASSES[each.category] ?? "series-8"})` : "var(--line)" },
    }),
  );
  texts.push(
    s("text", { x: x + 11, y: y + 19 }, cut(graph.name[at])),
    s("text", { x: x + 11, y: y + 35, class: "axis" }, cut(time)),
  );
  made.addEventListener("click", () => walk(at));
  made.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    walk(at);
  });
  made.addEventListener("pointermove", (event) =>
    showCard(
      event.clientX,
      event.clientY,
      h("b", {}, graph.name[at]),
      pairs([
        ["opcode", graph.opcode[at]],
        ["shape", graph.shape[at]],
        ["time", each?.seconds ? seconds(each.seconds) : null],
        ["module", each?.scope],
        ["source", each?.source],
        ["in", graph.computations[graph.computation[at]]],
      ]),
    ),
  );
  made.addEventListener("pointerleave", hideCard);
  return made;
}
