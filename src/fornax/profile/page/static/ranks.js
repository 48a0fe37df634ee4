// Ranks side by side: how far apart they finish, and which is late.

import { chart } from "fornax/chart.js";
import { h } from "fornax/dom.js";
import { count, percent, seconds } from "fornax/format.js";
import { table } from "fornax/table.js";
import { CAUSES, data, median } from "profile/model.js";

const DRAWN = 8; // curves that can be told apart

export function ranks(panel) {
  const { skew } = data;
  const section = h("section", {}, h("h2", {}, "Skew"));
  panel.append(section);
  let made = null;
  if (skew.length === 0) {
    section.append(h("p", { class: "lead" }, "No step was made by several ranks of this capture."));
  } else {
    const late = Map.groupBy(skew, (each) => each.late_rank);
    const [rank, times] = [...late].sort((a, b) => b[1].length - a[1].length)[0];
    const gap = median(skew.map((each) => each.seconds));
    section.append(
      h(
        "p",
        { class: "lead" },
        `Rank ${rank} (${data.info.hosts[data.info.ranks.indexOf(rank)] ?? "host not known"}) was the last in ${count(times.length)} of ${count(skew.length)} steps; ranks are ${seconds(gap)} apart in the median. Time of a rank is what a step took of it without waiting in exchanges.`,
      ),
    );
    made = chart({
      label: "Own time of ranks in each step",
      xLabel: "step",
      xFormat: count,
      yFormat: (value) => seconds(value),
      data: { x: skew.map((each) => each.number), series: curves(skew, rank) },
    });
    section.append(made.element);
  }
  panel.append(h("section", {}, h("h2", {}, "Ranks"), byRank()));
  return () => made?.destroy();
}

// One curve per rank; of many ranks their median in the band from the first to the last, and the one that is late.
function curves(skew, late) {
  const own = skew.map((each) => new Map(each.own_seconds));
  const all = [...new Set(own.flatMap((each) => [...each.keys()]))].sort((a, b) => a - b);
  const curve = (rank) => ({ label: `rank ${rank}`, y: own.map((each) => each.get(rank) ?? null) });
  if (all.length <= DRAWN) return all.map(curve);
  const over = (pick) => own.map((each) => pick([...each.values()]));
  return [
    {
      label: `median of ${all.length} ranks`,
      y: over(median),
      min: over((values) => Math.min(...values)),
      max: over((values) => Math.max(...values)),
    },
    curve(late),
  ];
}

function byRank() {
  const rows = data.info.ranks.map((rank, at) => {
    const steps = data.steps.filter((step) => step.rank === rank);
    const late = data.skew.filter((each) => each.late_rank === rank).length;
    const causes = Object.fromEntries(
      Object.keys(CAUSES).map((cause) => [cause, median(steps.map((step) => step.causes[cause] ?? 0))]),
    );
    return {
      rank,
      machine: data.info.hosts[at] ?? "",
      time: median(steps.map((step) => (step.end - step.begin) / 1e9)),
      late,
      ...causes,
    };
  });
  const columns = [
    { key: "rank", label: "Rank", value: (row) => row.rank },
    { key: "machine", label: "Host", value: (row) => row.machine, text: true },
    { key: "time", label: "Step", value: (row) => row.time, show: (row, value) => seconds(value), help: "Median" },
    ...Object.keys(CAUSES).map((cause) => ({
      key: cause,
      label: cause,
      value: (row) => row[cause],
      show: (row, value) => seconds(value),
    })),
    {
      key: "late",
      label: "Last in",
      value: (row) => row.late,
      show: (row, value) => (data.skew.length ? percent(value / data.skew.length, 2) : count(value)),
    },
  ];
  return table({ caption: "Ranks", columns, rows, key: (row) => row.rank }).element;
}
