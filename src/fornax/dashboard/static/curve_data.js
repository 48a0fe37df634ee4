// From the points of runs to the columns of a chart: one x for all, smoothing, bands over seeds.

const MOST = 3000, CELLS = 1200;

/** Curves on a common x.
 *
 * `curves`: [{label, x, y, min?, max?}], y null where a value was not finite. Where the runs have few
 * distinct x, all are kept and a curve is interpolated between its own points; of more each cell of an
 * equal grid has the mean, the least and the greatest. Returns {x, curves: [{..., y, min, max}]} with
 * null before a curve's first point, after its last and where it has a gap. */
export function aligned(curves, log = false) {
  const distinct = [...new Set(curves.flatMap((each) => each.x))].filter((x) => !log || x > 0).sort((a, b) => a - b);
  if (distinct.length <= MOST) return { x: distinct, curves: curves.map((each) => onto(each, distinct)) };
  const [low, high] = [distinct[0], distinct.at(-1)];
  const share = (i) => i / (CELLS - 1);
  const x = Array.from({ length: CELLS }, (_, i) => (log ? low * (high / low) ** share(i) : low + (high - low) * share(i)));
  return { x, curves: curves.map((each) => onto(cells(each, x, log), x)) };
}

function onto(curve, xs) {
  const { x, y, min, max } = curve;
  const columns = { y, ...(min && max ? { min, max } : {}) };
  const made = Object.fromEntries(Object.keys(columns).map((name) => [name, new Array(xs.length).fill(null)]));
  let at = 0;
  for (let i = 0; i < xs.length; i++) {
    while (at < x.length && x[at] < xs[i]) at++;
    if (at >= x.length) break;
    for (const [name, values] of Object.entries(columns)) {
      if (x[at] === xs[i]) made[name][i] = values[at];
      else if (at > 0 && values[at] !== null && values[at - 1] !== null) {
        const share = (xs[i] - x[at - 1]) / (x[at] - x[at - 1]);
        made[name][i] = values[at - 1] + share * (values[at] - values[at - 1]);
      }
    }
  }
  return { ...curve, x: xs, min: null, max: null, ...made };
}

function cells(curve, xs, log) {
  const ratio = log ? Math.log(xs.at(-1) / xs[0]) : xs.at(-1) - xs[0];
  const found = new Map();
  curve.x.forEach((x, i) => {
    if (curve.y[i] === null || (log && x <= 0)) return;
    const cell = Math.round(((log ? Math.log(x / xs[0]) : x - xs[0]) / ratio) * (xs.length - 1));
    const [low, high] = [curve.min?.[i] ?? curve.y[i], curve.max?.[i] ?? curve.y[i]];
    const held = found.get(cell);
    if (!held) found.set(cell, { sum: curve.y[i], count: 1, low, high });
    else Object.assign(held, { sum: held.sum + curve.y[i], count: held.count + 1, low: Math.min(held.low, low), high: Math.max(held.high, high) });
  });
  const kept = [...found.entries()].sort((a, b) => a[0] - b[0]);
  return { ...curve, x: kept.map(([cell]) => xs[cell]), y: kept.map(([, each]) => each.sum / each.count),
    min: kept.map(([, each]) => each.low), max: kept.map(([, each]) => each.high) };
}

/** A mean whose weights fall to 1/e over `width` units of x to both sides, so that it does not lag; gaps
 * stay gaps. */
export function smoothed(x, y, width) {
  if (!(width > 0)) return y;
  const ahead = oneSided(x, y, width, 1), behind = oneSided(x, y, width, -1);
  return y.map((value, i) => (value === null ? null : (ahead[i].sum + behind[i].sum - value) / (ahead[i].weight + behind[i].weight - 1)));
}

function oneSided(x, y, width, step) {
  const found = new Array(y.length);
  let sum = 0, weight = 0, before = null;
  for (let i = step > 0 ? 0 : y.length - 1; i >= 0 && i < y.length; i += step) {
    if (y[i] === null) continue;
    const kept = before === null ? 0 : Math.exp(-Math.abs(x[i] - before) / width);
    sum = sum * kept + y[i];
    weight = weight * kept + 1;
    before = x[i];
    found[i] = { sum, weight };
  }
  return found;
}

/** Runs that differ in nothing but their seed, together: [[run...]...]. */
export function overSeeds(runs) {
  const groups = new Map();
  for (const run of runs) {
    const config = Object.entries(run.config).filter(([key]) => !/(^|\.)(seed|run_dir|out|name)$/.test(key)).sort();
    const key = config.length ? JSON.stringify([run.kind, run.method, config]) : run.id;
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  return [...groups.values()];
}

/** The mean of aligned curves with the least and the greatest of them; null where none has a value. */
export function banded(label, curves) {
  const at = (i, fold) => {
    const values = curves.flatMap((each) => [each.y[i], each.min?.[i], each.max?.[i]]).filter((value) => value !== null && value !== undefined);
    return values.length ? fold(values) : null;
  };
  const mean = (i) => {
    const values = curves.map((each) => each.y[i]).filter((value) => value !== null);
    return values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null;
  };
  const indices = curves[0].x.map((_, i) => i);
  return { ...curves[0], label, y: indices.map(mean), min: indices.map((i) => at(i, (values) => Math.min(...values))),
    max: indices.map((i) => at(i, (values) => Math.max(...values))) };
}

/** What a log axis can show of a curve: values that are not positive become gaps. */
export function positive(curve) {
  const kept = (values) => values && values.map((value) => (value > 0 ? value : null));
  return { ...curve, y: kept(curve.y), min: kept(curve.min), max: kept(curve.max) };
}

/** Names in the order that readers look for: losses first, then rewards and evaluation, then by the alphabet. */
export function ordered(names) {
  const first = ["loss", "eval/loss", "reward", "accuracy", "eval/accuracy", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds"];
  const rank = (name) => (first.includes(name) ? first.indexOf(name) : first.length);
  return [...names].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
}
