// Training time that was lost, by cause, in rank time.

import { el } from "./dom.js";
import { seconds } from "./format.js";

const WORDS = {
  planned_move: "planned moves",
  interrupted_step: "interrupted steps",
  failover: "failovers",
  hold: "waiting for a standby",
  repeated_steps: "repeated steps",
};

export function ledger(job) {
  const lost = Object.entries(job.lost ?? {}).sort(([, a], [, b]) => b - a);
  const total = lost.reduce((sum, [, s]) => sum + s, 0);
  if (!total) return [el("p", { class: "none" }, "None since the daemons started.")];
  return [
    el("p", { class: "big" }, seconds(total / job.ranks), el("span", { class: "soft" }, ` per rank, ${seconds(total)} of rank time`)),
    el("dl", { class: "causes" }, lost.map(([cause, s]) => el("div", { "data-key": cause },
      el("dt", {}, WORDS[cause] ?? cause), el("dd", {}, seconds(s)),
      el("span", { class: "bar" }, el("span", { class: cause, style: { "flex-grow": String(s / total) } }),
        el("span", { class: "rest", style: { "flex-grow": String(1 - s / total) } }))))),
  ];
}
