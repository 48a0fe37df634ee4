// Rows of the time line as lanes of events that do not overlap, sorted, with sums that let a drawing skip what is smaller than a pixel.

import { data, eventsOf, operations } from "profile/model.js";

const DEEPEST = 40;
const RANKING = { operations: 0, exchange: 1, host: 2, python: 3 };

// The first position at which a sorted array is above a value, from a position on.
export function above(values, value, from = 0) {
  let step = 1;
  let low = from;
  let high = from;
  while (high < values.length && values[high] <= value) {
    // events that are near are found fast
    low = high + 1;
    high += step;
    step *= 2;
  }
  high = Math.min(high, values.length);
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Lanes of a row, the outermost events first: {index, begin, end, busy, hits}; `busy` sums durations before each event.
function split(events) {
  const { begin, duration } = events;
  const members = [];
  const ends = [];
  for (let at = 0; at < begin.length; at++) {
    while (ends.length && ends[ends.length - 1] <= begin[at]) ends.pop();
    const depth = Math.min(ends.length, DEEPEST - 1);
    (members[depth] ??= []).push(at);
    ends.push(begin[at] + duration[at]);
  }
  return members.map((list) => {
    const index = Int32Array.from(list);
    const lane = {
      index,
      begin: new Float64Array(index.length),
      end: new Float64Array(index.length),
      busy: new Float64Array(index.length + 1),
      hits: null,
    };
    for (let at = 0; at < index.length; at++) {
      lane.begin[at] = begin[index[at]];
      lane.end[at] = begin[index[at]] + duration[index[at]];
      lane.busy[at + 1] = lane.busy[at] + duration[index[at]];
    }
    return lane;
  });
}

let made = null;

// Rows in the order in which they are shown: {row, rank, label, events, lanes}; devices first, then the host's threads.
export function tracks() {
  if (made) return made;
  const many = data.info.ranks.length > 1;
  made = data.rows
    .filter((row) => row.count > 0)
    .map((row) => {
      const events = eventsOf(row);
      const label = [many ? `${row.rank}` : "", row.device, row.name].filter(Boolean).join(" · ");
      return { row, rank: row.rank, label, events, lanes: split(events), folded: false };
    });
  made.sort(
    (a, b) =>
      a.rank - b.rank ||
      RANKING[a.row.kind] - RANKING[b.row.kind] ||
      a.row.device.localeCompare(b.row.device, "en", { numeric: true }) ||
      a.row.name.localeCompare(b.row.name, "en", { numeric: true }),
  );
  return made;
}

// Begin and end of all that the time line shows.
export function extent(all) {
  let low = Infinity;
  let high = -Infinity;
  for (const { lanes } of all) {
    if (!lanes[0]) continue;
    low = Math.min(low, lanes[0].begin[0]);
    high = Math.max(
      high,
      lanes[0].end.reduce((most, each) => Math.max(most, each), -Infinity),
    );
  }
  for (const step of data.steps) {
    low = Math.min(low, step.begin);
    high = Math.max(high, step.end);
  }
  return low < high ? [low, high] : [0, 1];
}

// Mark events whose name, module, source or class matches, or that are of one operation; returns the hits, earliest first, as {track, lane, at}.
export function search(all, test) {
  if (test === null) {
    for (const { lanes } of all) for (const lane of lanes) lane.hits = null;
    return [];
  }
  const ofName = Uint8Array.from(data.names, (name) => test.name(name));
  const ofOperation = Uint8Array.from(operations, (each) => test.operation(each));
  const found = [];
  all.forEach(({ events, lanes }, track) =>
    lanes.forEach((lane, depth) => {
      lane.hits = new Int32Array(lane.index.length + 1);
      for (let at = 0; at < lane.index.length; at++) {
        const event = lane.index[at];
        const operation = events.operation[event];
        const hit = ofName[events.name[event]] || (operation >= 0 && ofOperation[operation]) ? 1 : 0;
        lane.hits[at + 1] = lane.hits[at] + hit;
        if (hit) found.push({ track, lane: depth, at, begin: lane.begin[at] });
      }
    }),
  );
  return found.sort((a, b) => a.begin - b.begin);
}

// What ran between two times: nanoseconds and runs by name of the event, the longest first, of rows of devices, else of all.
export function between(all, from, to) {
  const sums = new Map();
  const device = all.filter(({ row }) => row.kind === "operations" || row.kind === "exchange");
  for (const { events, lanes } of device.length ? device : all) {
    for (const lane of lanes) {
      for (let at = above(lane.end, from); at < lane.begin.length && lane.begin[at] < to; at++) {
        const name = events.name[lane.index[at]];
        const sum = sums.get(name) ?? {
          name: data.names[name],
          operation: operations[events.operation[lane.index[at]]] ?? null,
          time: 0,
          count: 0,
        };
        sum.time += Math.min(to, lane.end[at]) - Math.max(from, lane.begin[at]);
        sum.count += 1;
        sums.set(name, sum);
      }
    }
  }
  return [...sums.values()].sort((a, b) => b.time - a.time);
}
