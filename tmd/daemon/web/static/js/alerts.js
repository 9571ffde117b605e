// Alerts that are raised now, the gravest first, and what was published in the last hour.

import { chip, el, table } from "./dom.js";
import { byName, clock, count, grade } from "./format.js";

const SHOWN = 30;

export function alerts(open, log) {
  const sorted = [...open].sort((a, b) => grade(b.severity) - grade(a.severity) || byName(a.host, b.host));
  const more = open.length - SHOWN;
  return [
    table(["host", "severity", "code", "entity", "message"], sorted.slice(0, SHOWN).map((a) => [a,
      a.host, chip(a.severity, a.severity), a.code, a.entity, [a.message, a.count > 1 ? ` (${a.count} times)` : ""]]),
    (a) => a.id),
    more > 0 ? el("p", { class: "soft" }, `and ${count(more, "more alert")}`) : null,
    el("details", {}, el("summary", {}, `${count(log.length, "event")} of the last hour`),
      table(["at", "host", "event", "code", "message"], log.slice(0, 100).map((a) => {
        const word = a.state === "cleared" ? "cleared" : a.severity;
        return [a, clock(a.at), a.host, chip(word, word), a.code, a.message || a.entity];
      }))),
  ].filter(Boolean);
}
