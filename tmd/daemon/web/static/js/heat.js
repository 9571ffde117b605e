// Rank by time: how long each rank takes for a step, with a line at each plan.

import { colour } from "./charts.js";
import { byId } from "./dom.js";
import { clock, seconds } from "./format.js";

const CELL = 6;
const DOTS_HEIGHT = 14;
const POINTED_AT = 4;
const LEAST_HEIGHT = 48;
const AXIS = 54;
const CALM = 1.05;
const HOT = 1.5;
let shown = null;

/** 0 up to `CALM` times the median of all ranks, 1 from `HOT` times of it. */
const warmth = (value, usual) => (value && usual ? Math.min(1, Math.max(0, (value / usual - CALM) / (HOT - CALM))) : 0);

function median(values) {
  const sorted = values.filter(Boolean).sort((a, b) => a - b);
  return sorted[sorted.length >> 1] ?? 0;
}

export function heat(samples, marks, ranks) {
  const canvas = byId("heat").querySelector("canvas");
  canvas.hidden = byId("heat-scale").hidden = samples.length < 2;
  byId("heat-title").textContent = title(samples);
  shown = samples.length > 1 ? { samples, marks: within(samples, marks), ranks } : null;
  if (!shown) return;
  const bins = samples.at(-1).cells.length;
  const width = byId("heat").clientWidth, height = Math.max(LEAST_HEIGHT, bins * CELL), scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.style.width = `${width}px`;
  canvas.height = (height + DOTS_HEIGHT) * scale;
  canvas.style.height = `${height + DOTS_HEIGHT}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  drawCells(ctx, samples, width - AXIS, height);
  drawMarks(ctx, samples, shown.marks, width - AXIS, height);
  ctx.fillStyle = colour("soft");
  ctx.font = "11px system-ui";
  ctx.textAlign = "right";
  ctx.fillText("rank 0", AXIS - 6, 10);
  if (ranks > 1) ctx.fillText(`rank ${ranks - 1}`, AXIS - 6, height);
}

const title = (samples) => (samples.length < 2 ? "" : samples.at(-1).computed ? "Seconds of computing by rank" : "Seconds of a step by rank");

/** Where a time is, 0 to 1: the columns are as far apart as the samples. */
function along(samples) {
  const first = samples[0].at, span = Math.max(1, samples.at(-1).at - first);
  return (at) => (at - first) / span;
}

function drawCells(ctx, samples, width, height) {
  const x = along(samples), cold = colour("cold"), hot = colour("bad");
  samples.forEach((sample, n) => {
    // A column shows its own peers: a slow job is no straggler.
    const usual = median(sample.cells), left = AXIS + Math.round(x(sample.at) * width);
    const right = n + 1 < samples.length ? AXIS + Math.round(x(samples[n + 1].at) * width) : AXIS + width;
    const high = height / sample.cells.length;
    sample.cells.forEach((value, bin) => {
      const place = [left, Math.round(bin * high), Math.max(1, right - left), Math.max(1, Math.round(high) - 1)];
      ctx.globalAlpha = value ? 1 : 0.15;
      ctx.fillStyle = cold;
      ctx.fillRect(...place);
      ctx.globalAlpha = warmth(value, usual);
      ctx.fillStyle = hot;
      ctx.fillRect(...place);
    });
  });
  ctx.globalAlpha = 1;
}

/** The marks within the time of the samples. */
function within(samples, marks) {
  const x = along(samples);
  return marks.filter(([at]) => x(at) >= 0 && x(at) <= 1);
}

function drawMarks(ctx, samples, marks, width, height) {
  const x = along(samples);
  for (const [at, kind] of marks) {
    const place = x(at);
    ctx.fillStyle = colour(kind === "failover" ? "bad" : "main");
    ctx.fillRect(AXIS + place * width - 0.75, 0, 1.5, height + 4);
    ctx.beginPath();
    ctx.arc(AXIS + place * width, height + 8, 3.5, 0, 7);
    ctx.fill();
  }
}

/** What a plan's mark near the pointer says. */
function markAt(left, width) {
  const x = along(shown.samples), off = ([at]) => Math.abs(x(at) * width - left);
  const [nearest] = shown.marks.filter((mark) => off(mark) <= POINTED_AT).sort((a, b) => off(a) - off(b));
  return nearest && `${clock(nearest[0])} · ${nearest[1]} · ${nearest[2]}`;
}

/** What the cell under the pointer says. */
function cellAt(left, top, width, height) {
  const { samples, ranks } = shown, x = along(samples);
  const sample = samples.findLast((s) => x(s.at) <= left / width) ?? samples[0];
  const bin = Math.floor((top / height) * sample.cells.length);
  if (bin < 0 || bin >= sample.cells.length) return undefined;
  const size = Math.ceil(ranks / sample.cells.length), last = Math.min(ranks, (bin + 1) * size) - 1;
  const which = size > 1 ? `slowest of ranks ${bin * size}–${last}` : `rank ${bin}`;
  return `${clock(sample.at)} · step ${sample.step} · ${which}: ${seconds(sample.cells[bin])}`;
}

/** Says what is under the pointer. */
export function watchHeat() {
  const canvas = byId("heat").querySelector("canvas");
  canvas.addEventListener("pointermove", (event) => {
    if (!shown) return;
    const left = event.offsetX - AXIS, width = canvas.clientWidth - AXIS, height = canvas.clientHeight - DOTS_HEIGHT;
    const lines = [cellAt(left, event.offsetY, width, height), markAt(left, width)];
    byId("heat-at").textContent = lines.filter(Boolean).join(" — ");
  });
  canvas.addEventListener("pointerleave", () => { byId("heat-at").textContent = ""; });
}
