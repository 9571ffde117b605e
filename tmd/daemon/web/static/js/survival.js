// The answer that people come for: would the job survive a loss now?

import { el } from "./dom.js";
import { count, decimal, number, seconds } from "./format.js";

export const OUTLOOKS = {
  survives: ["Survives a loss now", "good"],
  likely: ["Likely survives a loss", "warn"],
  halts: ["Would not survive a loss", "bad"],
  moving: ["A plan is under way", "busy"],
  unknown: ["Not known", "warn"],
  ended: ["Has ended", "idle"],
};

const fact = (name, value, note, kind = "") => el("div", { class: `fact ${kind}` },
  el("dt", {}, name), el("dd", {}, value), el("dd", { class: "soft" }, note));

export function survival(job) {
  const of = job.survival, [words, kind] = OUTLOOKS[of.outlook] ?? [of.outlook, "idle"];
  return [el("div", { class: `outlook card ${kind}`, "data-outlook": of.outlook },
    el("div", { class: "answer" },
      el("p", { class: "soft" }, `job ${job.job} · ${job.state} · epoch ${job.epoch} · ${count(job.ranks, "rank")}`),
      el("p", { class: "verdict" }, el("span", { class: "lamp" }), words),
      el("p", {}, of.sentence, job.detail ? el("span", { class: "soft" }, ` — ${job.detail}`) : null)),
    el("dl", { class: "facts" }, facts(job, of)))];
}

function facts(job, of) {
  const fit = of.rehearsed + of.unrehearsed;
  const standbys = [`${of.rehearsed} rehearsed`, of.unfit ? `${of.unfit} unfit` : ""];
  const age = of.snapshot;
  return [
    fact("standbys", number(fit), standbys.filter(Boolean).join(", "), fit ? "" : "bad"),
    fact("hot", number(of.hot), of.hot ? `at most ${seconds(of.lag_s)} behind` : "none shadows a rank"),
    age ? fact("snapshot", seconds(age.seconds), `${count(age.behind, "step")} old, of step ${number(age.step)}`)
      : fact("snapshot", "–", "none is complete"),
    fact("checkpoint", of.checkpoint === null || of.checkpoint === undefined ? "–" : number(of.checkpoint),
      of.checkpoint ? "newest complete step" : "none known"),
    fact("step", number(job.step ?? 0), job.step_s ? `${seconds(job.step_s)} each` : "pace not known"),
    fact("loss", job.loss === undefined || job.loss === null ? "–" : decimal(job.loss), "mean of all ranks"),
  ];
}

/** One tab for each job, if there are several. */
export function jobTabs(jobs, selected) {
  if (jobs.length < 2) return [];
  return jobs.map((job, n) => el("button", {
    type: "button", "data-key": job.job, "data-act": "job", "data-job": job.job,
    "aria-pressed": String(job.job === selected), class: (OUTLOOKS[job.survival.outlook] ?? [])[1],
  }, el("span", { class: "lamp" }), job.job, n < 9 ? el("kbd", {}, n + 1) : null));
}

export function banners(cluster) {
  const found = [];
  if (cluster?.paused) {
    found.push(el("p", { class: "banner warn" }, el("strong", {}, "Paused."),
      " No new plan is opened, also not after a loss, until an operator resumes."));
  }
  if (cluster?.breaker) {
    found.push(el("p", { class: "banner bad" }, el("strong", {}, "The breaker is open: "),
      `${cluster.breaker}. Policies move no rank until an operator resumes; drains and replacements of dead workers go on.`));
  }
  for (const job of cluster?.unread_jobs ?? []) {
    found.push(el("p", { class: "banner bad" }, `A later version of tmd wrote the record of job ${job}: update tmd here.`));
  }
  return found;
}
