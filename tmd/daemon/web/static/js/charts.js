// Loss and pace over time, with a line at each plan.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { byId } from "./dom.js";
import { seconds } from "./format.js";

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
    width, height: HEIGHT, cursor: { y: false, sync: { key: "time" } }, legend: { live: true },
    hooks: { draw: [drawMarks] },
    scales: { x: { time: true } },
    axes: [{ ...axis, size: 24 }, { ...axis, size: 54, values: (_, ticks) => ticks.map(value) }],
    series: [{ value: "{HH}:{mm}:{ss}" }, { label, stroke, width: 1.5, fill: `${stroke}18`, value: (_, v) => (v === null ? "–" : value(v)) }],
  };
}

export function charts(samples, plans) {
  marks = plans;
  const place = byId("charts"), dress = `${place.clientWidth} ${colour("card")}`;
  byId("pace-none").hidden = samples.length > 0;
  if (!samples.length || dress !== dressed) {
    drawn.forEach((u) => u.destroy());
    drawn.clear();
    dressed = dress;
  }
  if (!samples.length) return;
  const at = samples.map((s) => s.at);
  const half = Math.floor((place.clientWidth - 16) / (place.clientWidth > 640 ? 2 : 1));
  draw("loss", [at, samples.map((s) => s.loss ?? null)], () => chart("loss", colour("main"), half, (v) => v.toPrecision(4)));
  draw("step", [at, samples.map((s) => s.step_s)], () => chart("step", colour("accent"), half, seconds));

  function draw(name, data, options) {
    const known = drawn.get(name);
    if (known) known.setData(data);
    else drawn.set(name, new uPlot(options(), data, place));
  }
}
