// Time by module of the model as an icicle: forward and backward apart, then modules, then operations.

import { keep } from "fornax/address.js";
import { h, hideCard, pairs, replace, s, showCard } from "fornax/dom.js";
import { count, percent, seconds } from "fornax/format.js";
import { operationFacts } from "profile/operations.js";
import { CLASSES, operations } from "profile/model.js";
import { classLegend, NO_OPERATIONS, nothing, operationLinks, sized } from "profile/parts.js";

const LINE = 24;
const LEAST = 1.2; // pixels of a box that is drawn

// A tree of {name, seconds, children, parent, depth, operation}.
function tree() {
  const root = node("all operations", null);
  for (const each of operations) {
    if (each.seconds <= 0) continue;
    const path = [
      each.backward ? "backward" : each.scope ? "forward" : "outside of modules",
      ...(each.scope ? each.scope.split("/") : []),
    ];
    let at = root;
    at.seconds += each.seconds;
    for (const name of path) {
      at = child(at, name);
      at.seconds += each.seconds;
    }
    const leaf = node(each.name, at);
    Object.assign(leaf, { seconds: each.seconds, operation: each });
    at.children.set(`operation ${each.index}`, leaf);
  }
  order(root);
  return root;
}

function node(name, parent) {
  return { name, parent, seconds: 0, children: new Map(), depth: parent ? parent.depth + 1 : 0, operation: null };
}

function child(parent, name) {
  if (!parent.children.has(`module ${name}`)) parent.children.set(`module ${name}`, node(name, parent));
  return parent.children.get(`module ${name}`);
}

function order(at) {
  at.list = [...at.children.values()].sort((a, b) => b.seconds - a.seconds);
  at.list.forEach(order);
  at.height = 1 + Math.max(0, ...at.list.map((each) => each.height));
}

function pathOf(at) {
  const out = [];
  for (let each = at; each.parent; each = each.parent) out.unshift(each.name);
  return out;
}

function found(root, path) {
  let at = root;
  for (const name of path) {
    const next = at.list.find((each) => each.name === name);
    if (!next) break;
    at = next;
  }
  return at;
}

export function flame(panel, values) {
  const root = tree();
  if (root.seconds === 0) {
    panel.append(nothing(NO_OPERATIONS));
    return null;
  }
  let focus = found(root, (values.at ?? "").split("/").filter(Boolean));
  let active = focus;
  let pattern = null;
  const crumbs = h("nav", { class: "bar", "aria-label": "Path in the flame graph" });
  const details = h("aside", { class: "details", "aria-live": "polite" });
  const search = h("input", {
    type: "search",
    placeholder: "find: regular expression",
    "aria-label": "Find in the flame graph",
  });
  const said = h("span", { class: "soft", role: "status" });
  const drawing = sized((width) => draw(width));

  function zoom(to) {
    focus = to;
    active = to;
    keep({ at: pathOf(to).join("/") });
    refresh();
  }

  function refresh(keepFocus = true) {
    const parents = [];
    for (let each = focus; each; each = each.parent) parents.unshift(each);
    replace(
      crumbs,
      parents.map((each, at) => [
        at ? "›" : "",
        h("button", { type: "button", class: "plain", on: { click: () => zoom(each) } }, each.name),
      ]),
    );
    drawing.again();
    if (keepFocus) drawing.element.querySelector('[tabindex="0"]')?.focus();
  }

  function choose(at) {
    active = at;
    replace(
      details,
      h("h2", { class: "mono" }, at.name),
      at.operation
        ? [operationFacts(at.operation), operationLinks(at.operation, "flame")]
        : pairs([
            ["time", `${seconds(at.seconds)}, ${percent(at.seconds / root.seconds)} of all`],
            ["below", `${count(at.list.length)} parts`],
          ]),
    );
  }

  function hits(at) {
    return pattern !== null && (pattern.test(at.name) || (at.operation !== null && pattern.test(at.operation.op_name)));
  }

  // The box of a node; its text lies above all boxes, for a box has its name from `aria-label`.
  function box(at, x, y, width, texts) {
    const style = at.operation
      ? { fill: `var(--${CLASSES[at.operation.category] ?? "series-8"})` }
      : {
          fill:
            at.depth === 0
              ? "var(--line)"
              : `color-mix(in oklab, var(--${side(at)}) ${58 - Math.min(7, at.depth) * 5}%, var(--paper))`,
        };
    const room = Math.floor((width - 8) / 7);
    const share = at.seconds / root.seconds;
    const label =
      room >= 3
        ? at.name.length > room
          ? `${at.name.slice(0, room - 1)}…`
          : room > at.name.length + 8
            ? `${at.name}  ${percent(share, 2)}`
            : at.name
        : "";
    const kind = hits(at) ? "hit" : pattern ? "miss" : "";
    if (label)
      texts.push(s("text", { x: x + 5, y: y + 16, class: `${kind} ${at.operation ? "on-colour" : ""}` }, label));
    const made = s(
      "g",
      {
        class: `box ${kind}`,
        role: "treeitem",
        tabindex: at === active ? "0" : "-1",
        "aria-level": at.depth + 1,
        "aria-label": `${at.name}, ${seconds(at.seconds)}, ${percent(share)}`,
        "aria-expanded": at.list.length ? String(at === focus) : null,
      },
      s("rect", { x: x + 0.5, y, width: Math.max(0.7, width - 1), height: LINE - 2, rx: 3, style }),
    );
    made.addEventListener("click", () => {
      choose(at);
      if (at.list.length) zoom(at === focus && at.parent ? at.parent : at);
    });
    made.addEventListener("focus", () => {
      if (active !== at) {
        drawing.element.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
        made.setAttribute("tabindex", "0");
      }
      choose(at);
    });
    made.addEventListener("pointermove", (event) =>
      showCard(
        event.clientX,
        event.clientY,
        h("b", {}, at.name),
        pairs([
          ["time", seconds(at.seconds)],
          ["of all", percent(share)],
          ["of its parent", at.parent && percent(at.seconds / at.parent.seconds)],
          ["class", at.operation?.category],
          ["runs", at.operation && count(at.operation.count)],
          ["source", at.operation?.source],
        ]),
      ),
    );
    made.addEventListener("pointerleave", hideCard);
    return made;
  }

  function draw(width) {
    const [boxes, texts] = [[], []];
    let small = 0;
    let deepest = 0;
    const above = [];
    for (let each = focus.parent; each; each = each.parent) above.unshift(each);
    above.forEach((each, level) => boxes.push(box(each, 0, level * LINE, width, texts)));
    const walk = (at, x, level, room) => {
      if (room < LEAST) {
        small += 1;
        return;
      }
      deepest = Math.max(deepest, level);
      boxes.push(box(at, x, level * LINE, room, texts));
      let from = x;
      for (const each of at.list) {
        const part = (each.seconds / at.seconds) * room;
        walk(each, from, level + 1, part);
        from += part;
      }
    };
    walk(focus, 0, above.length, width);
    said.textContent = pattern
      ? `${count(matches(root))} match`
      : small
        ? `${count(small)} too small to draw: zoom in`
        : "";
    return s(
      "svg",
      {
        width,
        height: (deepest + 1) * LINE + 4,
        role: "tree",
        "aria-label": "Time by module; arrow keys walk, Enter zooms, Escape zooms out",
        class: "flame",
      },
      boxes,
      s("g", { "aria-hidden": "true" }, texts),
    );
  }

  function matches(at) {
    return (hits(at) ? 1 : 0) + at.list.reduce((sum, each) => sum + matches(each), 0);
  }

  drawing.element.addEventListener("keydown", (event) => {
    if (!event.target.closest("g.box")) return;
    const siblings = active.parent && active !== focus ? active.parent.list : [active];
    const at = siblings.indexOf(active);
    const to = {
      ArrowDown: active.list[0],
      ArrowUp: active === focus ? null : active.parent,
      ArrowRight: siblings[at + 1],
      ArrowLeft: siblings[at - 1],
    }[event.key];
    if (event.key === "Enter") zoom(active.list.length ? active : active.parent);
    else if (event.key === "Escape" && focus.parent) zoom(focus.parent);
    else if (to) {
      active = to;
      choose(to);
      refresh();
    } else return;
    event.preventDefault();
  });
  search.addEventListener("input", () => {
    try {
      pattern = search.value ? new RegExp(search.value, "i") : null;
      search.setAttribute("aria-invalid", "false");
    } catch {
      pattern = null;
      search.setAttribute("aria-invalid", "true");
    }
    drawing.again();
  });
  panel.append(
    h("section", {}, h("div", { class: "bar" }, search, said), crumbs, drawing.element, classLegend(), details),
  );
  refresh(false);
  return drawing.end;
}

function side(at) {
  let each = at;
  while (each.depth > 1) each = each.parent;
  return each.name === "backward" ? "series-4" : each.name === "forward" ? "series-1" : "series-8";
}
