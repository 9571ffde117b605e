// A lane for each plan, from the detection to its end, with its evidence and its verdict.

import { chip, el } from "./dom.js";
import { clock, count, seconds } from "./format.js";

const SHOWN = 12;
const EARLIER_S = 120;

const final = (plan) => plan.phase === "done" || plan.phase === "aborted";
const startOf = (plan) => plan.detected_at || plan.timeline?.[0]?.[1] || 0;
const endOf = (plan, now) => (final(plan) && plan.timeline?.length ? plan.timeline.at(-1)[1] : now);

export function lanes(plans, log, now) {
  if (!plans.length) return [el("p", { class: "none" }, "No rank has moved yet.")];
  return [...plans].sort((a, b) => startOf(b) - startOf(a)).slice(0, SHOWN).map((plan) => lane(plan, log, now));
}

function lane(plan, log, now) {
  const end = endOf(plan, now), long = Math.max(0, end - startOf(plan));
  const verdict = plan.phase === "done" ? ["done", "good"] : plan.phase === "aborted" ? ["given up", "bad"] : [plan.phase, "busy"];
  return el("details", { class: "lane", "data-key": plan.id, "data-phase": plan.phase },
    el("summary", {},
      el("span", { class: "head" },
        chip(plan.kind, plan.kind), el("b", {}, moves(plan)),
        el("span", { class: "soft" }, `${plan.id} · ${clock(startOf(plan))}`),
        el("span", { class: "space" }), chip(`${verdict[0]} · ${seconds(long)}`, verdict[1])),
      el("span", { class: "bar" }, parts(plan, end).map(([phase, length]) => el("span", {
        class: phase, title: `${phase} ${seconds(length)}`, style: { "flex-grow": String(length + long / 8 + 0.001) },
      }, el("i", {}, `${phase} ${seconds(length)}`))))),
    evidence(plan, log));
}

function moves(plan) {
  const named = (plan.moves ?? []).slice(0, 3).map(([rank, from, to]) => `rank ${rank}: ${from} → ${to || "?"}`);
  const more = (plan.moves?.length ?? 0) + (plan.more_moves ?? 0) - named.length;
  return named.join(", ") + (more > 0 ? ` and ${more} more` : "") || "no rank moved";
}

/** [phase, seconds] from the detection on; the last phase of a plan that has ended takes no time. */
function parts(plan, end) {
  const marks = plan.timeline ?? [], found = [];
  if (plan.detected_at && marks.length && marks[0][1] > plan.detected_at) {
    found.push(["detect", marks[0][1] - plan.detected_at]);
  }
  marks.forEach(([phase, at], n) => {
    if (phase === "done" || phase === "aborted") return;
    found.push([phase, Math.max(0, (marks[n + 1]?.[1] ?? end) - at)]);
  });
  return found;
}

function evidence(plan, log) {
  const since = startOf(plan) - EARLIER_S, until = plan.timeline?.[0]?.[1] ?? Infinity;
  const from = new Set((plan.moves ?? []).map(([, host]) => host));
  const raised = log.filter((a) => from.has(a.host) && a.state === "raised" && a.at >= since && a.at <= until + 1);
  const alerts = [...new Map(raised.map((a) => [a.id, a])).values()];
  const facts = [
    ["cause", plan.cause], ["why", plan.reason], ["policy", plan.policy], ["how", plan.how],
    ["rollback", plan.rollback], ["outcome", plan.outcome || (plan.phase === "done" ? "the job went on in the new epoch" : "")],
    ...alerts.map((a) => ["alert", `${clock(a.at)} ${a.code} on ${a.host}: ${a.message || a.entity}`]),
    ...(plan.choice ?? []).map((sentence) => ["choice", sentence]),
    ...Object.entries(plan.timings ?? {}).map(([name, s]) => ["measured", `${name} ${seconds(s)}`]),
  ].filter(([, value]) => value);
  return el("dl", { class: "evidence" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** Plans for the charts: [at, kind, moves]. */
export const marksOf = (plans) => plans.map((plan) => [startOf(plan), plan.kind, moves(plan)]).filter(([at]) => at);

export const busy = (plans) => plans.some((plan) => !final(plan));
export const planCount = (plans) => count(plans.length, "plan");
