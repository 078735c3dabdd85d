// Asks for an overview each second and shows it. Text is inserted as text, never as HTML.
"use strict";

const SHOWN = 120; // bars of a chart, one per second
const PERIOD_MS = 1000;
const STALE_MS = 5000;
// What a decode worker and what a Forwarder calls the same.
const REMOTE = ["remote", "disaggregated"];
const LOCAL = ["local", "alone"];

const bars = []; // oldest first: {remote, local, moved}, per second
let last = null; // the previous overview

const byId = (id) => document.getElementById(id);
const known = (value, show = (v) => v.toLocaleString("en")) =>
  value === null || value === undefined ? "–" : show(value);

function asTime(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return `${(seconds * 1000).toFixed(seconds >= 0.1 ? 0 : 1)} ms`;
}

function asBytes(amount) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (amount < 1000) return `${amount.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    amount /= 1000;
  }
  return `${amount.toFixed(1)} TB`;
}

function asAge(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function cell(content, kind = "", tag = "td") {
  const made = document.createElement(tag);
  made.className = kind;
  made.append(content);
  if (tag === "th") made.scope = "row";
  return made;
}

function kindOf(state) {
  if (state === "ready") return "good";
  return state === "starting" || state === "draining" ? "middling" : "bad";
}

function fill(id, rows, nothing) {
  const body = byId(id);
  if (rows.length === 0) {
    const row = document.createElement("tr");
    const only = cell(nothing);
    only.colSpan = 8;
    row.append(only);
    rows = [row];
  }
  body.replaceChildren(...rows);
}

function row(cells, kind = "") {
  const made = document.createElement("tr");
  made.className = kind;
  made.append(...cells);
  return made;
}

function usage(share) {
  if (share === null) return cell("–");
  const meter = document.createElement("meter");
  meter.value = share;
  meter.setAttribute("aria-hidden", "true");
  const shown = cell(meter);
  shown.append(`${(share * 100).toFixed(0)} %`);
  return shown;
}

function showTables(seen) {
  fill("workers", seen.workers.map((w) => row([
    cell(`${w.component}-${known(w.instance)}`), cell(w.lease, "code"),
    cell(w.state, kindOf(w.state)), cell(w.model || "–"), cell(known(w.running), "number"),
    cell(known(w.waiting), "number"), usage(w.kv_usage), cell(asAge(w.age_s), "number"),
  ])), "no live workers");
  fill("decisions", seen.decisions.map((d) => row([
    cell(d.verdict), cell(d.reason), cell(d.per_s.toFixed(1), "number"),
    cell(d.total.toLocaleString("en"), "number"),
  ], REMOTE.includes(d.verdict) && d.per_s > 0 ? "busy" : "")), "no decisions yet");
  fill("failed-links", seen.failed_links.map((l) => row([
    cell(l.prefill, "code"), cell(l.decode, "code"),
    cell(l.next_try === null ? "never" : new Date(1000 * l.next_try).toLocaleTimeString()),
    cell(l.detail, "bad"),
  ])), "no failed links");
}

function showLatency(id, latency) {
  byId(id).textContent = known(latency.p50_s, asTime);
  byId(`${id}-more`).textContent =
    latency.p95_s === null ? "" : `p95 ${asTime(latency.p95_s)} of ${latency.count.toLocaleString("en")}`;
}

function sum(decisions, verdicts, field) {
  return decisions.filter((d) => verdicts.includes(d.verdict)).reduce((all, d) => all + d[field], 0);
}

function showTiles(seen) {
  const { queue, transfers } = seen;
  byId("in-flight").textContent = known(seen.in_flight);
  byId("in-flight-more").textContent =
    seen.engines.map((e) => `${e.usable} of ${e.known} ${e.role} engines`).join(", ");
  byId("queue").textContent = known(queue.jobs, (n) => `${n.toLocaleString("en")} ${n === 1 ? "job" : "jobs"}`);
  byId("queue-more").textContent = known(queue.tokens, (n) => `${n.toLocaleString("en")} tokens`).replace("–", "");
  const remote = sum(seen.decisions, REMOTE, "per_s");
  const local = sum(seen.decisions, LOCAL, "per_s");
  byId("decided").textContent = `${(remote + local).toFixed(1)} /s`;
  byId("decided-more").textContent = `${remote.toFixed(1)} remote, ${local.toFixed(1)} local`;
  byId("moved").textContent = `${asBytes(transfers.bytes_per_s)}/s`;
  byId("moved-more").textContent = `${transfers.jobs_per_s.toFixed(1)} jobs/s, ${transfers.total_jobs.toLocaleString("en")} so far`;
  showLatency("ttft", seen.ttft);
  showLatency("itl", seen.itl);
}

// Each bar is one interval; a total that shrank lost a worker that has left.
function addBar(seen) {
  if (last !== null && seen.at > last.at) {
    const per = (now, before) => Math.max(0, now - before) / (seen.at - last.at);
    const decided = (verdicts) =>
      per(sum(seen.decisions, verdicts, "total"), sum(last.decisions, verdicts, "total"));
    bars.push({
      remote: decided(REMOTE), local: decided(LOCAL),
      moved: per(seen.transfers.total_bytes, last.transfers.total_bytes),
    });
    bars.splice(0, bars.length - SHOWN);
  }
  last = seen;
}

function draw(id, layers) {
  const heights = bars.map((bar) => layers.reduce((all, name) => all + bar[name], 0));
  const peak = Math.max(0, ...heights);
  const feet = bars.map(() => 40);
  const paths = layers.map((name) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const parts = bars.map((bar, i) => {
      const height = peak > 0 ? (bar[name] / peak) * 38 : 0;
      if (height === 0) return "";
      feet[i] -= height;
      return `M${SHOWN - bars.length + i + 0.1} ${feet[i]}h0.8v${height}h-0.8z`;
    });
    path.setAttribute("class", name);
    path.setAttribute("d", parts.join(""));
    return path;
  });
  byId(id).replaceChildren(...paths);
  return peak;
}

function showCharts() {
  byId("decided-peak").textContent = `peak ${draw("decided-chart", ["remote", "local"]).toFixed(1)} /s`;
  byId("moved-peak").textContent = `peak ${asBytes(draw("moved-chart", ["moved"]))}/s`;
}

function showTrouble(sentences) {
  byId("trouble").replaceChildren(...sentences.map((text) => cell(text, "", "li")));
  byId("trouble").hidden = sentences.length === 0;
}

function show(seen) {
  byId("namespace").textContent = seen.namespace;
  showTrouble(seen.trouble);
  addBar(seen);
  showTiles(seen);
  showCharts();
  showTables(seen);
  byId("windows").textContent =
    `Rates over ${seen.rate_s} s, latencies over ${seen.latency_s} s, charts over two minutes; ` +
    "totals since the live workers started.";
}

// Screen readers read it aloud on each assignment, so it is set only when it changes.
function showConnection(state, text) {
  const shown = byId("connection");
  shown.dataset.state = state;
  if (shown.textContent !== text) shown.textContent = text;
}

async function poll() {
  let seen = null;
  try {
    const answer = await fetch("/dashboard/overview", { signal: AbortSignal.timeout(STALE_MS) });
    if (!answer.ok) throw new Error(answer.statusText);
    seen = await answer.json();
  } catch {
    showConnection("lost", "disconnected: these figures are stale");
  }
  setTimeout(poll, PERIOD_MS);
  if (seen === null) return;
  showConnection("live", "live");
  show(seen);
}

poll();
