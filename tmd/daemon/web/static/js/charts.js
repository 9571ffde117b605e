// Loss and pace over time, with a line at each plan.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { byId } from "./dom.js";
import { clock, decimal, seconds } from "./format.js";

const WORDS = { loss: "Loss", step: "Seconds of a step" };
const HEIGHT = 132;
const drawn = new Map();
let dressed = "";
let marks = [];

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A vertical line at each plan. */
function drawMarks(u) {
  const { ctx, bbox } = u;
  ctx.save();
  for (const [at, kind] of marks) {
    const x = Math.round(u.valToPos(at, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = colour(kind === "failover" ? "bad" : "main");
    ctx.setLineDash([4, 3]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function chart(label, stroke, width, value) {
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width, height: HEIGHT, legend: { show: false }, padding: [8, 12, 0, 0],
    cursor: { y: false, sync: { key: "time" }, points: { size: 6 } },
    hooks: { draw: [drawMarks], setCursor: [tell], setData: [tell] },
    scales: { x: { time: true } },
    axes: [
      { ...axis, size: 22, space: 70, values: (_, ticks) => ticks.map(clock) },
      { ...axis, size: 54, space: 28, values: (_, ticks) => ticks.map(value) }],
    series: [{}, { label, stroke, width: 1.5, fill: `${stroke}20`, value: (_, v) => value(v) }],
  };

  /** Above the chart: the value under the pointer, else the newest. */
  function tell(u) {
    const at = u.cursor.idx ?? u.data[0].length - 1, v = u.data[1][at];
    const when = u.cursor.idx === null || u.cursor.idx === undefined ? "" : ` at ${clock(u.data[0][at])}`;
    byId(`${label}-title`).textContent = `${WORDS[label]}: ${v === null || v === undefined ? "–" : value(v)}${when}`;
  }
}

export function charts(samples, plans) {
  marks = plans;
  const place = byId("charts"), dress = `${place.clientWidth} ${colour("card")}`;
  const enough = samples.length > 1;
  byId("pace-none").hidden = enough;
  place.hidden = !enough;
  if (!enough || dress !== dressed) {
    drawn.forEach((u) => u.destroy());
    drawn.clear();
    dressed = dress;
  }
  if (!enough) return;
  const at = samples.map((s) => s.at);
  const width = byId("loss-chart").clientWidth;
  draw("loss", [at, samples.map((s) => s.loss ?? null)], () => chart("loss", colour("main"), width, decimal));
  draw("step", [at, samples.map((s) => s.step_s)], () => chart("step", colour("accent"), width, seconds));

  function draw(name, data, options) {
    const known = drawn.get(name);
    if (known) known.setData(data);
    else drawn.set(name, new uPlot(options(), data, byId(`${name}-chart`)));
  }
}
