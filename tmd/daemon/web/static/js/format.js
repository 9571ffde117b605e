// Numbers and times for people.

export function seconds(s) {
  if (s < 0.0995) return `${Math.round(s * 1000)} ms`;
  if (s < 9.95) return `${s.toFixed(2)} s`;
  if (s < 99.5) return `${s.toFixed(1)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(1)} h`;
  return `${Math.round(s / 86400)} d`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
export const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
export const decimal = (n) => (Math.abs(n) < 1e5 ? n.toFixed(n < 100 ? 4 : 1) : n.toExponential(2));
export const number = (n) => n.toLocaleString("en");

const names = new Intl.Collator("en", { numeric: true });
export const byName = (a, b) => names.compare(a, b);

const GRADES = ["", "info", "warning", "degraded", "fatal"];
export const grade = (severity) => GRADES.indexOf(severity ?? "");
