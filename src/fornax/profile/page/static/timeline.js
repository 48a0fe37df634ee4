// The time line: rows of ranks, devices and threads; zoom, pan, search, an event's details.

import { keep } from "fornax/address.js";
import { h, hideCard, replace, showCard, typing } from "fornax/dom.js";
import { count, seconds } from "fornax/format.js";
import { onTheme } from "fornax/theme.js";
import { eventCard, eventDetails, factsOf, spanDetails } from "profile/events.js";
import { above, extent, search, tracks } from "profile/lanes.js";
import { data, operations } from "profile/model.js";
import { density, gutter, HEAD, LANE, layout, OVERVIEW, paint, repaint } from "profile/painter.js";
import { classLegend, nothing } from "profile/parts.js";

const NEAREST = 20; // nanoseconds that fill the width at the deepest zoom

export function timeline(panel, values) {
  const all = tracks();
  if (all.length === 0) {
    panel.append(nothing("The capture holds no events."));
    return null;
  }
  const [low, high] = extent(all);
  const state = {
    all,
    extent: [low, high],
    density: density(all, [low, high]),
    top: 0,
    chosen: null,
    marked: null,
    ...layout(all),
  };
  let view = start(values, low, high);
  let hits = [];
  let hitAt = -1;
  let drag = null;
  let frame = 0;
  let later = 0;
  let pending = {};

  const canvas = h("canvas", {
    tabindex: "0",
    role: "application",
    "aria-label": `Time line of ${count(all.length)} rows over ${seconds((high - low) / 1e9)}: W and S zoom, A and D pan, arrows walk through events, Enter fits`,
    class: "timeline",
  });
  const tall = h("div", {}, canvas);
  const port = h("div", { class: "port" }, tall);
  const fitted = () => {
    tall.style.height = `${state.height}px`;
    port.style.height = `${state.height + 2}px`; // with its border; the style sheet says how much at most
  };
  fitted();
  const field = h("input", {
    type: "search",
    placeholder: "find: regular expression",
    "aria-label": "Find events",
    value: values.find ?? "",
  });
  const said = h("span", { class: "soft", role: "status" });
  const details = h("aside", { class: "details", "aria-live": "polite" });
  const button = (text, label, act) =>
    h("button", { type: "button", "aria-label": label, title: label, on: { click: act } }, text);
  panel.append(
    h(
      "section",
      { class: "flush" },
      h(
        "div",
        { class: "bar" },
        field,
        button("‹", "Previous match", () => step(-1)),
        button("›", "Next match", () => step(1)),
        said,
        h("span", { class: "spread" }),
        button("+", "Zoom in", () => around(0.5)),
        button("−", "Zoom out", () => around(2)),
        button("All", "Show all", () => move(low, high)),
      ),
      port,
      h("div", { class: "bar under" }, classLegend(), h("span", { class: "soft" }, "Shift and drag measures a span.")),
      details,
    ),
  );

  // Drawing

  // Keep values in the address once the reader rests: browsers allow it a few times a second.
  function remember(values) {
    pending = { ...pending, ...values };
    clearTimeout(later);
    later = setTimeout(() => {
      keep(pending);
      pending = {};
    }, 250);
  }

  function redraw() {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      const [width, height] = [port.clientWidth, port.clientHeight];
      if (!width) return;
      const ratio = devicePixelRatio || 1;
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
        Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
      }
      const context = canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      state.top = port.scrollTop;
      paint(context, width, height, view, state);
    });
  }

  function move(from, to) {
    const span = Math.min(Math.max(to - from, NEAREST), (high - low) * 1.02);
    const middle = Math.min(Math.max((from + to) / 2, low), high);
    view = { from: middle - span / 2, to: middle + span / 2 };
    redraw();
    remember({ from: Math.round(view.from), to: Math.round(view.to), step: null, rank: null });
  }

  function around(factor, middle = (view.from + view.to) / 2) {
    move(middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);
  }

  const pan = (share) => move(view.from + (view.to - view.from) * share, view.to + (view.to - view.from) * share);

  function timeAt(offset) {
    const left = gutter(port.clientWidth);
    return view.from + ((offset - left) / (port.clientWidth - left)) * (view.to - view.from);
  }

  // Events

  function eventAt(offsetX, offsetY) {
    if (offsetX < gutter(port.clientWidth) || offsetY < HEAD) return null;
    const y = offsetY + port.scrollTop;
    const place = state.places.find((each) => y >= each.top && y < each.top + each.lanes * LANE);
    if (!place) return null;
    const depth = Math.floor((y - place.top) / LANE);
    const lane = place.track.lanes[depth];
    const time = timeAt(offsetX);
    const slack = (1.5 / (port.clientWidth - gutter(port.clientWidth))) * (view.to - view.from);
    const at = above(lane.end, time - slack);
    return at < lane.begin.length && lane.begin[at] <= time + slack
      ? { track: all.indexOf(place.track), lane: depth, at }
      : null;
  }

  function choose(chosen, fit = false) {
    state.chosen = chosen;
    if (!chosen) {
      replace(details);
      redraw();
      return;
    }
    const each = factsOf(all, chosen);
    const end = each.begin + each.duration;
    if (fit || end < view.from || each.begin > view.to) {
      const span = Math.max(each.duration * 3, fit ? 0 : view.to - view.from);
      move(each.begin + each.duration / 2 - span / 2, each.begin + each.duration / 2 + span / 2);
    }
    const place = state.places.find(({ track }) => track === all[chosen.track]);
    const y = place.top + chosen.lane * LANE;
    if (y < port.scrollTop + HEAD || y + LANE > port.scrollTop + port.clientHeight)
      port.scrollTop = y - port.clientHeight / 2;
    replace(details, eventDetails(each, low));
    redraw();
  }

  function walk(by) {
    const { chosen } = state;
    if (!chosen) return choose(firstShown());
    const at = chosen.at + by;
    if (at >= 0 && at < all[chosen.track].lanes[chosen.lane].begin.length) choose({ ...chosen, at });
    return null;
  }

  function climb(by) {
    const { chosen } = state;
    if (!chosen) return choose(firstShown());
    const flat = all.flatMap((track, index) =>
      (track.folded ? [track.lanes[0]] : track.lanes).map((_, lane) => ({ track: index, lane })),
    );
    const to = flat[flat.findIndex((each) => each.track === chosen.track && each.lane === chosen.lane) + by];
    if (!to) return null;
    const lane = all[to.track].lanes[to.lane];
    const { begin } = factsOf(all, chosen);
    return choose({ ...to, at: Math.min(above(lane.end, begin), lane.begin.length - 1) });
  }

  function firstShown() {
    const at = Math.min(above(all[0].lanes[0].end, view.from), all[0].lanes[0].begin.length - 1);
    return { track: 0, lane: 0, at };
  }

  // Search

  function find(test, text) {
    hits = search(all, test);
    hitAt = -1;
    said.textContent = test
      ? `${count(hits.length)} ${hits.length === 1 ? "match" : "matches"}${text ? ` of ${text}` : ""}`
      : "";
    redraw();
  }

  function byText() {
    try {
      const pattern = field.value ? new RegExp(field.value, "i") : null;
      field.setAttribute("aria-invalid", "false");
      find(
        pattern && {
          name: (name) => pattern.test(name),
          operation: (each) =>
            pattern.test(each.scope) ||
            pattern.test(each.source) ||
            pattern.test(each.op_name) ||
            pattern.test(each.category),
        },
      );
    } catch (error) {
      field.setAttribute("aria-invalid", "true");
      said.textContent = error.message;
    }
    remember({ find: field.value, operation: null });
  }

  function step(by) {
    if (hits.length === 0) return;
    if (hitAt < 0) hitAt = by > 0 ? hits.findIndex((each) => each.begin >= view.from) - 1 : hits.length;
    hitAt = (hitAt + by + hits.length) % hits.length;
    said.textContent = `${count(hitAt + 1)} of ${count(hits.length)}`;
    choose(hits[hitAt]);
  }

  let typed = 0;
  field.addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(byText, 120);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") step(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") canvas.focus();
  });

  // Pointer and keys

  canvas.addEventListener("pointerdown", (event) => {
    const { offsetX, offsetY } = event;
    const { clientWidth } = port;
    canvas.setPointerCapture(event.pointerId);
    hideCard();
    if (offsetY < OVERVIEW) drag = { kind: "overview" };
    else
      drag = {
        kind: event.shiftKey ? "measure" : "pan",
        x: offsetX,
        y: offsetY,
        from: view.from,
        time: timeAt(offsetX),
        scroll: port.scrollTop,
        moved: false,
        label: offsetX < gutter(clientWidth),
      };
    if (drag.kind === "overview") jump(offsetX);
  });

  function jump(offsetX) {
    const left = gutter(port.clientWidth);
    const middle = low + ((offsetX - left) / (port.clientWidth - left)) * (high - low);
    move(middle - (view.to - view.from) / 2, middle + (view.to - view.from) / 2);
  }

  canvas.addEventListener("pointermove", (event) => {
    const { offsetX, offsetY } = event;
    if (!drag) {
      const found = eventAt(offsetX, offsetY);
      if (!found) return hideCard();
      const each = factsOf(all, found);
      return showCard(event.clientX, event.clientY, eventCard(each));
    }
    if (drag.kind === "overview") return jump(offsetX);
    drag.moved ||= Math.abs(offsetX - drag.x) + Math.abs(offsetY - drag.y) > 4;
    if (!drag.moved) return null;
    if (drag.kind === "measure") {
      const [from, to] = [drag.time, timeAt(offsetX)].sort((a, b) => a - b);
      state.marked = { from, to };
      said.textContent = seconds((to - from) / 1e9);
      return redraw();
    }
    const span = view.to - view.from;
    const shift = ((offsetX - drag.x) / (port.clientWidth - gutter(port.clientWidth))) * span;
    move(drag.from - shift, drag.from - shift + span);
    port.scrollTop = drag.scroll - (offsetY - drag.y);
    return null;
  });

  canvas.addEventListener("pointerup", (event) => {
    const done = drag;
    drag = null;
    if (!done || done.kind === "overview") return;
    if (done.kind === "measure" && done.moved) replace(details, spanDetails(all, state.marked));
    else if (!done.moved) {
      state.marked = null;
      const y = event.offsetY + port.scrollTop;
      const place =
        done.label && event.offsetY >= HEAD
          ? state.places.find((each) => y >= each.top && y < each.top + each.lanes * LANE)
          : null;
      if (place) {
        place.track.folded = !place.track.folded;
        Object.assign(state, layout(all));
        fitted();
        redraw();
      } else choose(eventAt(event.offsetX, event.offsetY));
    }
  });
  canvas.addEventListener("pointercancel", () => {
    drag = null;
  });
  canvas.addEventListener("pointerleave", hideCard);
  canvas.addEventListener("dblclick", () => state.chosen && choose(state.chosen, true));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (event.offsetX < gutter(port.clientWidth)) return; // the names scroll the rows
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / 1000);
      else around(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) / 400), timeAt(event.offsetX));
    },
    { passive: false },
  );
  port.addEventListener("scroll", redraw);

  const acts = {
    w: () => around(0.7),
    s: () => around(1 / 0.7),
    a: () => pan(-0.2),
    d: () => pan(0.2),
    n: () => step(1),
    p: () => step(-1),
    f: () => state.chosen && choose(state.chosen, true),
    Enter: () => state.chosen && choose(state.chosen, true),
    0: () => move(low, high),
    ArrowLeft: () => walk(-1),
    ArrowRight: () => walk(1),
    ArrowUp: () => climb(-1),
    ArrowDown: () => climb(1),
    Escape: () => {
      state.marked = null;
      choose(null);
    },
  };
  const onKey = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event) || document.querySelector("dialog[open]"))
      return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const inside =
      event.target === canvas || event.target === document.body || event.target === document.getElementById("panel");
    if (!acts[key] || !(inside || /^[wasdnpf]$/.test(key))) return;
    event.preventDefault();
    acts[key]();
  };
  addEventListener("keydown", onKey);

  const watch = new ResizeObserver(redraw);
  watch.observe(port);
  const endTheme = onTheme(() => {
    repaint();
    redraw();
  });

  if (operations[values.operation]) {
    const asked = operations[values.operation];
    field.value = "";
    find({ name: () => false, operation: (each) => each === asked }, asked.name);
    if (hits.length) choose(hits[0], !values.from);
    else said.textContent = `${asked.name} has no event on the time line`;
  } else if (field.value) byText();
  redraw();
  return () => {
    removeEventListener("keydown", onKey);
    watch.disconnect();
    endTheme();
    search(all, null);
    clearTimeout(later);
    clearTimeout(typed);
  };
}

// What the address asks for: two times, a step of a rank, or all.
function start(values, low, high) {
  const [from, to] = [Number(values.from), Number(values.to)];
  if (values.from && values.to && to > from) return { from, to };
  const found = data.steps.find(
    (each) => String(each.number) === values.step && (values.rank === undefined || String(each.rank) === values.rank),
  );
  if (!found) return { from: low, to: high };
  const air = (found.end - found.begin) * 0.04;
  return { from: found.begin - air, to: found.end + air };
}
