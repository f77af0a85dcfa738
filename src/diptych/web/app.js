"use strict";

// What is asked. `image` is a File, `like` the id of an item; picks are the choices of the column menus,
// by name: a column may be called constructor.
const state = { query: "", image: null, like: "", kind: "image", filter: "", picks: Object.create(null), hybrid: false, rerank: false, weight: 1, k: 24 };
const PAGE = 24, PAUSE = 350, RERANKED = 50, FITTING = 6; // hits a page; milliseconds of rest while typing; hits that are re-ranked; texts of an image
const INTERNAL = new Set(["split"]); // columns that say nothing to those who search; a typed filter may name them
const WORDS = new Set(["and", "or", "not", "in", "like", "contains", "is", "null", "true", "false"]); // of the filters
let depth = 0; // steps of this page that one can go back
let about = null, running = null, timer = 0, token = sessionStorage.getItem("token") || "";

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat();

// ---------------------------------------------------------------- talking to the service

class Refused extends Error {
  constructor(message, position, status = 0) { super(message); this.position = position; this.status = status; }
}

async function ask(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The service does not answer. Check that it is still running.");
  }
  if (answer.status === 401) {
    await login((await answer.json()).error);
    return ask(path, options);
  }
  if (!answer.ok) {
    const failure = await answer.json().catch(() => ({ error: `The service answered with status ${answer.status}.` }));
    throw new Refused(failure.error, failure.position, answer.status);
  }
  return answer;
}

function login(sentence) {
  $("refusal").textContent = token ? capital(sentence) : "Give the token that the service was started with.";
  $("token").value = "";
  if (!$("login").open) $("login").showModal();
  return new Promise((resolve) => {
    $("login").addEventListener("close", () => {
      token = $("token").value.trim();
      sessionStorage.setItem("token", token);
      resolve();
    }, { once: true });
  });
}

async function show(img, path) {
  img.dataset.path = path;
  // an <img> sends no token: then the picture is fetched by hand
  if (!token || path.startsWith("blob:")) { img.src = path; return; }
  try {
    const blob = await (await ask(path)).blob();
    if (img.dataset.path !== path) return; // meanwhile it was given another
    const url = img.src = URL.createObjectURL(blob);
    for (const end of ["load", "error"]) img.addEventListener(end, () => URL.revokeObjectURL(url), { once: true });
  } catch { img.dispatchEvent(new Event("error")); }
}

// seconds into a video as a player shows them
function clock(time) {
  const [hours, minutes, seconds] = [Math.floor(time / 3600), Math.floor(time / 60) % 60, Math.floor(time) % 60].map(String);
  return hours === "0" ? `${minutes}:${seconds.padStart(2, "0")}` : `${hours}:${minutes.padStart(2, "0")}:${seconds.padStart(2, "0")}`;
}

const picture = (id) => `/api/thumbnail?id=${encodeURIComponent(id)}`;
const large = (id) => `/api/image?id=${encodeURIComponent(id)}`;
// a frame opens its video, at its time
const opened = (id, time) => time === null ? large(id) : `/api/video?id=${encodeURIComponent(id)}#t=${time}`;

// ---------------------------------------------------------------- the question

const capital = (sentence) => sentence[0].toUpperCase() + sentence.slice(1);

function quoted(text) { return `"${String(text).replace(/[\\"]/g, "\\$&")}"`; }

// a value and a column as a filter has them (diptych/index/query/filters.py); no filter can name a column with a back quote
const literal = (value) => typeof value === "boolean" ? value : quoted(value);
const column = (name) => /^[\p{L}_][\p{L}\p{Nd}_.-]*$/u.test(name) && !WORDS.has(name.toLowerCase()) ? name : `\`${name}\``;
const nameable = ([name]) => name && !name.includes("`");

function filter() {
  const parts = Object.entries(state.picks).map(([name, value]) => `${column(name)} = ${literal(value)}`);
  const own = state.filter.trim();
  if (own) parts.unshift(parts.length ? `(${own})` : own);
  return parts.join(" and ");
}

function asks() { return Boolean(state.query.trim() || state.image || state.like); }

function find(kind, k, signal, query = state.query) {
  const fields = { k: Math.min(k, about.limits.k), kind, filter: kind === state.kind ? filter() : "" };
  if (!asks()) return ask(`/api/browse?${new URLSearchParams(fields)}`, { signal });
  if (query.trim()) fields.query = query;
  if (state.like) fields.like = state.like;
  if ((state.like || state.image) && query.trim()) fields.image_weight = state.weight;
  if (state.hybrid && query.trim()) fields.hybrid = true;
  if ("video" in state.picks) fields.frames = true; // one video was chosen: then every frame of it counts
  if (state.rerank && kind === state.kind) fields.rerank = Math.min(RERANKED, about.limits.k);
  if (!state.image) return ask(`/api/search?${new URLSearchParams(fields)}`, { signal });
  const body = new FormData();
  for (const [name, value] of Object.entries(fields)) body.append(name, value);
  body.append("images", state.image, state.image.name || "image");
  return ask("/api/search", { method: "POST", body, signal });
}

async function search({ keep = false, typing = false } = {}) {
  if (!about) return start();
  clearTimeout(timer);
  if (!keep) state.k = PAGE;
  if (running) running.abort();
  const mine = running = new AbortController();
  remember();
  dress();
  document.body.classList.add("busy");
  try {
    const found = await (await find(state.kind, state.k, mine.signal)).json();
    if (mine.signal.aborted) return;
    list(found);
    await panel(mine.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (typing && error.position !== undefined) return; // half an expression: the rest is on its way
    await fail(error);
  } finally {
    if (running === mine) document.body.classList.remove("busy");
  }
}

function soon() {
  clearTimeout(timer);
  timer = setTimeout(() => search({ typing: true }), PAUSE);
}

// ---------------------------------------------------------------- the answer

function list(found) {
  const grid = $("grid"), focused = grid.contains(document.activeElement);
  const best = Math.max(...found.hits.map((hit) => hit.score), 1e-9);
  const judged = found.hits.some((hit) => "pair" in hit.details); // then the others were scored on another scale
  const items = found.hits.map((hit) => card(hit, found.matched === false ? 0 : best, !judged || "pair" in hit.details));
  const first = found.hits.findIndex((hit) => hit.matches === false);
  if (first > 0) {
    const line = document.createElement("li");
    line.className = "divider";
    line.textContent = "close, but below what counts as a match";
    items.splice(first, 0, line);
  }
  grid.classList.toggle("lines", state.kind === "text");
  grid.replaceChildren(...items);
  const cards = [...grid.querySelectorAll(".card")];
  if (cards.length) cards[0].tabIndex = 0;
  if (focused && cards.length) cards[0].focus();
  const more = found.hits.length === state.k && state.k < about.limits.k;
  $("more").hidden = !more;
  tell(found);
}

function tell(found) {
  const things = state.kind === "image" ? "images" : "texts";
  const total = number.format(state.kind === "image" ? about.images : about.texts);
  const passing = found.passing === 1 ? `1 ${state.kind} that passes` : `${number.format(found.passing ?? 0)} ${things} that pass`;
  notice();
  explain(found.hits.length ? found.note : "", found.warning);
  if (!found.hits.length && about.images + about.texts === 0) {
    notice("calm", "This collection is empty", "Add images to it with the command diptych index.");
    $("status").textContent = "";
  } else if (!found.hits.length) {
    if (filter()) notice("calm", `No ${things} here`, "Nothing in the collection passes the filter.", unfilter, "Clear the filters");
    else notice("calm", `No ${things} here`, `The collection has no ${things}.`);
    $("status").textContent = "";
  } else if (!asks()) {
    $("status").textContent = filter() ? `${found.hits.length < found.passing ? "Some of the" : "The"} ${passing} the filter` : `A look at the collection of ${total} ${things}`;
  } else {
    const matches = found.hits.filter((hit) => hit.matches).length;
    const shown = found.matched && matches < found.hits.length ? `${matches} match` + (matches === 1 ? "" : "es") : `${found.hits.length} ${found.matched === false ? "closest" : "best"}`;
    const among = filter() ? `of the ${passing} the filter (${total} in all)` : `of ${total} ${things}`;
    $("status").textContent = `${shown} ${among} · ${Math.max(1, Math.round(found.seconds * 1000))} ms`;
    if (found.matched === false) {
      const which = filter() ? `No ${state.kind} that passes the filter` : `No ${state.kind}`;
      notice("", "Nothing matches", `${which} stands out from the rest of the collection for this search. The closest ones are shown below.`, filter() ? unfilter : null, "Clear the filters");
    }
  }
}

function explain(note, warning = "") {
  $("warning").textContent = warning && `${capital(warning)}.`;
  $("why").hidden = !note;
  $("note").textContent = note && `${capital(note)}.`;
}

// the number is the one that orders the results; a bar would call the nearest of a search without matches full
function card(hit, best, comparable = true, asked = asks()) {
  const item = $("card").content.cloneNode(true).firstElementChild;
  const button = item.querySelector(".card"), img = item.querySelector("img"), frame = item.querySelector(".frame");
  const moment = hit.time === null ? "" : clock(hit.time), mark = item.querySelector(".time");
  const caption = hit.text.split("\n")[0] || hit.path || hit.id;
  const named = moment ? `${caption} at ${moment}` : caption;
  mark.textContent = moment;
  mark.hidden = !moment;
  button.dataset.id = hit.id;
  button.title = `More like this\n${hit.id}`;
  item.querySelector(".caption").textContent = caption;
  img.addEventListener("error", () => frame.classList.add("none"));
  const source = hit.kind === "image" ? hit.id : hit.image_id;
  if (source) show(img, picture(source)); else frame.classList.add("none");
  if (asked) {
    const fused = "similarity" in hit.details && !("pair" in hit.details); // sums of 1 / rank: small, close numbers
    const score = comparable ? hit.score.toFixed(fused ? 4 : 3) : "";
    const made = Object.entries(hit.details).map(([name, value]) => `${name} ${Number(value.toPrecision(3))}`).join(", ");
    item.querySelector(".score b").textContent = score;
    item.querySelector(".meter").hidden = !best || !comparable;
    if (best) item.querySelector(".meter i").style.width = `${Math.max(0, Math.min(1, hit.score / best)) * 100}%`;
    if (made) button.title += `\n${made}`;
    item.querySelector(".spoken").textContent = `${hit.matches === false ? ", not a match" : ""}${score ? ", score " : ""}`;
    item.classList.toggle("below", hit.matches === false);
  } else {
    item.querySelector(".score").hidden = true;
    item.querySelector(".caption").style.marginBottom = "11px";
  }
  button.addEventListener("click", () => like(hit));
  const open = item.querySelector(".open");
  open.hidden = Boolean(token) || !source; // a link sends no token
  if (!open.hidden) {
    open.href = opened(source, hit.time);
    open.setAttribute("aria-label", `Open ${named}`);
  }
  return item;
}

function notice(tone = null, title = "", text = "", retry = null, label = "Try again") {
  const box = $("notice");
  box.hidden = tone === null;
  box.className = `notice ${tone || ""}`;
  box.querySelector("strong").textContent = title;
  box.querySelector("span").textContent = text;
  box.querySelector("button").hidden = !retry;
  box.querySelector("button").textContent = label;
  box.querySelector("button").onclick = retry;
}

async function fail(error) {
  const wrong = error instanceof Refused && error.position !== undefined && /filter/.test(error.message);
  document.querySelector(".filter").classList.toggle("wrong", wrong);
  if (wrong) unfold(true);
  shut(); // it showed the image of an earlier question
  const kept = $("grid").childElementCount > 0;
  $("more").hidden = true;
  $("status").textContent = kept ? "What the search before found:" : "";
  explain("");
  const hopeless = error instanceof Refused && error.status >= 400 && error.status < 500;
  if (hopeless && state.image && error.position === undefined) { // no picture: nobody wants to send it again
    drop();
    remember();
    dress();
  }
  const before = wrong && Object.keys(state.picks).length ? 1 : 0; // characters that filter() put before the typed ones
  if (wrong && document.activeElement === $("filter")) $("filter").setSelectionRange(Math.max(0, error.position - before), $("filter").value.length);
  const message = error.message.replace(/at character (\d+)/g, (_, place) => `at character ${Math.max(1, place - before)}`);
  notice("bad", wrong ? "The filter has a mistake" : "That did not work", capital(message), wrong ? unfilter : hopeless ? null : start, wrong ? "Clear the filters" : "Try again");
  if (!kept && hopeless && about) await look();
}

// what stands below a refusal where nothing was found before: some of the collection
async function look() {
  const found = await ask(`/api/browse?${new URLSearchParams({ k: Math.min(PAGE, about.limits.k), kind: "image" })}`).catch(() => null);
  if (!found || $("grid").childElementCount) return;
  $("grid").replaceChildren(...(await found.json()).hits.map((hit) => card(hit, 0, false, false)));
  $("status").textContent = "A look at the collection:";
}

// ---------------------------------------------------------------- the chosen image and its texts

async function panel(signal) {
  const chosen = Boolean(state.image || state.like);
  if (!chosen) { shut(); return; }
  let item = null;
  if (state.like) [item] = await (await ask(`/api/items?id=${encodeURIComponent(state.like)}`, { signal })).json();
  if (signal.aborted) return;
  const lines = item ? [...new Set(item.text.split("\n").filter(Boolean))] : []; // equal captions once
  const source = item && (item.kind === "image" ? item.id : item.image_id);
  $("whole").hidden = $("chip").querySelector("img").hidden = !(state.image || source);
  if (!state.image && source) show($("chip").querySelector("img"), picture(source));
  if (state.image) show($("picture"), preview(state.image));
  else if (source) show($("picture"), large(source));
  const moment = item && item.time !== null ? item.time : null;
  $("whole").title = moment === null ? "Open the picture" : `Open the video at ${clock(moment)}`;
  $("whole").removeAttribute("href");
  act(source && !state.image ? source : "", moment, item?.path || "", item?.file || item?.path || "");
  const name = lines[0] || item?.path || state.like;
  $("title").textContent = state.image ? state.image.name || "Your image" : moment === null ? name : `${name} at ${clock(moment)}`;
  $("own").replaceChildren(...lines.slice(1).map((line) => element("li", line)));
  const facts = Object.entries(item ? { ...item.metadata, path: item.path } : {}).filter(([name, value]) => value !== null && value !== "" && !INTERNAL.has(name));
  $("facts").hidden = !facts.length;
  $("columns").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", name), element("dd", Array.isArray(value) ? value.join(", ") : String(value))]));
  $("fits").hidden = true;
  $("panel").hidden = false;
  $("main").classList.add("paired");
  if (about.texts && (state.image || item?.kind === "image")) await fits(signal);
}

// open, download, copy the path: of an item that has a picture
function act(source, moment, path, place) {
  $("acts").hidden = !source;
  if (!source) return;
  const name = (path || source).split("/").pop();
  const direct = !token; // a link sends no token: then the file is fetched by hand
  for (const link of [$("open"), $("download")]) {
    link.href = opened(source, moment);
    link.onclick = direct ? null : async (event) => {
      event.preventDefault();
      const url = URL.createObjectURL(await (await ask(opened(source, moment).split("#")[0])).blob());
      const made = element("a");
      Object.assign(made, link === $("download") ? { href: url, download: name } : { href: url, target: "_blank" });
      made.click();
      setTimeout(() => URL.revokeObjectURL(url), 60000);
    };
  }
  if (direct) $("whole").href = opened(source, moment);
  $("download").download = name;
  $("copy").hidden = !place;
  $("copy").textContent = "Copy path";
  $("copy").onclick = async () => {
    await copied(place);
    $("copy").textContent = "Copied";
  };
}

async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).catch(() => selected(text));
  return selected(text); // a page that did not come over HTTPS has no clipboard
}

function selected(text) {
  const field = element("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

async function fits(signal) {
  const found = await (await find("text", 4 * FITTING, signal, "")).json(); // the image alone, whatever it is mixed with
  if (signal.aborted) return;
  const seen = new Set(), fresh = found.hits.filter(({ text }) => !seen.has(text) && seen.add(text)); // equal captions once
  $("fits").hidden = !fresh.length;
  $("texts").replaceChildren(...fresh.slice(0, FITTING).map((hit) => {
    const line = element("li"), button = element("button", "");
    button.type = "button";
    button.append(element("span", hit.text), element("b", hit.score.toFixed(3)));
    button.classList.toggle("below", hit.matches === false);
    button.title = "Search for this text";
    button.addEventListener("click", () => { drop(); state.like = ""; state.kind = "image"; state.query = hit.text; visit(); });
    line.append(button);
    return line;
  }));
}

function unfilter() {
  state.filter = $("filter").value = "";
  state.picks = Object.create(null);
  visit();
}

function shut() {
  $("panel").hidden = true;
  $("main").classList.remove("paired");
}

function like(hit) {
  drop();
  state.like = hit.id;
  state.query = "";
  if (hit.kind === "text") state.kind = "image";
  visit();
  scrollTo({ top: 0 });
}

let shownFile = null, shownUrl = "";
function preview(file) {
  if (file !== shownFile) {
    if (shownUrl) URL.revokeObjectURL(shownUrl);
    [shownFile, shownUrl] = [file, URL.createObjectURL(file)];
  }
  return shownUrl;
}

function take(file) {
  if (!file) return;
  if (!file.type.startsWith("image/")) { notice("bad", "That did not work", `${file.name || "What you gave"} is not an image.`); return; }
  state.image = file;
  state.like = "";
  visit();
}

function drop() { state.image = null; }

// ---------------------------------------------------------------- the page

function element(name, text = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  return made;
}

function dress() {
  if (document.activeElement !== $("query")) $("query").value = state.query;
  $("chip").hidden = !(state.image || state.like);
  if (state.image) {
    $("chip").querySelector("img").hidden = false;
    show($("chip").querySelector("img"), preview(state.image));
    $("chip").querySelector(".chip-name").textContent = state.image.name || "image";
  } else if (state.like) {
    $("chip").querySelector(".chip-name").textContent = "like this";
  }
  const narrow = matchMedia("(max-width: 620px)").matches;
  const hint = narrow ? "Words or an image" : "Describe what you look for, or drop an image";
  $("query").placeholder = state.image || state.like ? (narrow ? "Add words" : "Add words to change it") : hint;
  $("clear").hidden = !state.query;
  $("balance").hidden = !((state.image || state.like) && state.query.trim());
  $("weight").value = Math.log2(state.weight);
  $("hybrid").checked = state.hybrid;
  $("rerank").checked = state.rerank;
  if (document.activeElement !== $("filter")) $("filter").value = state.filter;
  document.querySelector(".filter").classList.remove("wrong");
  document.querySelector(`[name=kind][value=${state.kind}]`).checked = true;
  const filters = Object.keys(state.picks).length + (state.filter ? 1 : 0) + (state.hybrid ? 1 : 0) + (state.rerank ? 1 : 0);
  $("options").textContent = filters ? `Filters (${filters})` : "Filters";
  for (const select of $("picks").children) {
    const value = state.picks[select.name];
    select.value = value === undefined ? "" : JSON.stringify(value);
    select.classList.toggle("chosen", value !== undefined);
  }
  const words = state.query.trim();
  document.title = words ? `${words} · Diptych` : "Diptych search";
}

function menus() {
  const usable = Object.entries(about.values).filter(nameable).filter(([name]) => !INTERNAL.has(name)).filter(([, values]) => values.length > 1 && values.length < 50);
  $("picks").replaceChildren(...usable.slice(0, 6).map(([name, values]) => {
    const select = element("select");
    select.name = name;
    select.setAttribute("aria-label", `Only ${name}`);
    select.append(new Option(`${name}: any`, ""), ...[...values].sort((a, b) => String(a).localeCompare(String(b))).map((value) => new Option(String(value), JSON.stringify(value))));
    select.addEventListener("change", () => {
      if (select.value) state.picks[name] = JSON.parse(select.value); else delete state.picks[name];
      visit();
    });
    return select;
  }));
  const columns = Object.entries(about.columns).filter(nameable).filter(([name]) => !INTERNAL.has(name));
  $("filter").placeholder = columns.length ? `Filter, such as ${example(columns)}` : "Filter";
}

// controls that cannot work here are absent
function offer() {
  const columns = Object.keys(about.columns).length > 0;
  $("kinds").hidden = !about.texts && state.kind === "image";
  $("hybrid").parentElement.hidden = !about.words;
  $("rerank").parentElement.hidden = !about.rerank;
  $("filter").parentElement.hidden = !columns && !state.filter;
  $("options").hidden = !(columns || about.words || about.rerank);
  $("size").textContent = [[about.images, "image"], [about.texts, "text"]].filter(([count]) => count)
    .map(([count, name]) => `${number.format(count)} ${name}${count === 1 ? "" : "s"}`).join(" · ");
}

// on a phone, filters and options fold away
function unfold(open) {
  $("controls").classList.toggle("unfolded", open);
  $("options").setAttribute("aria-expanded", open);
}

function example(columns) {
  const filled = ([name]) => about.values[name]?.find((value) => value !== "");
  const [name, kinds] = columns.find(([, held]) => held.includes("number")) || columns.find(filled) || columns[0];
  if (kinds.includes("number")) return `${column(name)} < 50`;
  const value = filled([name]) ?? (kinds.includes("boolean") ? true : "…");
  return `${column(name)} ${kinds.includes("list") ? "contains" : "="} ${literal(value)}`;
}

// the address holds the question (but not an uploaded image): it can be kept, sent, and gone back to
function remember() {
  const address = new URLSearchParams();
  if (state.query.trim()) address.set("q", state.query);
  if (state.like) address.set("like", state.like);
  if (state.kind !== "image") address.set("kind", state.kind);
  if (state.filter) address.set("filter", state.filter);
  if (state.hybrid) address.set("hybrid", "1");
  if (state.rerank) address.set("rerank", "1");
  for (const [name, value] of Object.entries(state.picks)) address.set(`only.${name}`, JSON.stringify(value));
  history.replaceState({ image: state.image, weight: state.weight, depth }, "", address.size ? `?${address}` : "/");
}

function visit() {
  depth += 1;
  history.pushState(null, "", location.href);
  return search();
}

function recall() {
  const address = new URLSearchParams(location.search);
  state.query = address.get("q") || "";
  state.like = address.get("like") || "";
  state.kind = address.get("kind") === "text" ? "text" : "image";
  state.filter = address.get("filter") || "";
  state.hybrid = address.get("hybrid") === "1";
  state.rerank = address.get("rerank") === "1";
  state.picks = Object.create(null);
  for (const [name, value] of address) {
    if (name.startsWith("only.")) try { state.picks[name.slice(5)] = JSON.parse(value); } catch { /* not ours */ }
  }
  depth = history.state?.depth || 0;
  state.image = history.state?.image || null;
  state.weight = history.state?.weight || 1;
  $("query").value = state.query;
  $("filter").value = state.filter;
}

function columnsOf(cards) {
  const top = cards[0].getBoundingClientRect().top;
  const end = cards.findIndex((one) => one.getBoundingClientRect().top > top + 4);
  return end < 0 ? cards.length : end;
}

function move(event) {
  const cards = [...$("grid").querySelectorAll(".card")], at = cards.indexOf(document.activeElement);
  if (!cards.length) return;
  if (at < 0) {
    if (event.key === "ArrowDown" && document.activeElement === $("query")) { event.preventDefault(); cards[0].focus(); }
    return;
  }
  const wide = columnsOf(cards);
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide, Home: -at, End: cards.length - 1 - at }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  if (at + step < 0) { $("query").focus(); return; }
  const next = cards[Math.min(cards.length - 1, at + step)];
  cards[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

function escape() {
  if ((state.image || state.like) && depth) { $("query").focus(); history.back(); } // to what was asked before
  else if (state.image || state.like) { drop(); state.like = ""; $("query").focus(); visit(); }
  else if (state.query) { state.query = ""; $("query").value = ""; $("query").focus(); visit(); }
  else document.activeElement.blur();
}

function bind() {
  $("search").addEventListener("submit", (event) => { event.preventDefault(); state.query = $("query").value; visit(); });
  $("query").addEventListener("input", () => { state.query = $("query").value; soon(); });
  $("filter").addEventListener("change", () => { state.filter = $("filter").value; visit(); });
  $("hybrid").addEventListener("change", () => { state.hybrid = $("hybrid").checked; visit(); });
  $("rerank").addEventListener("change", () => { state.rerank = $("rerank").checked; visit(); });
  $("weight").addEventListener("input", () => { state.weight = 2 ** Number($("weight").value); soon(); });
  for (const radio of document.querySelectorAll("[name=kind]")) radio.addEventListener("change", () => { state.kind = radio.value; visit(); });
  $("clear").addEventListener("click", () => { state.query = $("query").value = ""; $("query").focus(); visit(); });
  $("chip").querySelector("button").addEventListener("click", () => { drop(); state.like = ""; visit(); });
  $("close").addEventListener("click", () => { drop(); state.like = ""; visit(); });
  $("more").addEventListener("click", () => { state.k = Math.min(about.limits.k, state.k + PAGE); search({ keep: true }); });
  $("options").addEventListener("click", () => unfold($("options").getAttribute("aria-expanded") === "false"));
  $("pick").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => { take($("file").files[0]); $("file").value = ""; });
  addEventListener("popstate", () => { recall(); search(); });
  addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
    if (file) { event.preventDefault(); take(file); }
  });
  let depth = 0;
  addEventListener("dragenter", (event) => { event.preventDefault(); depth += 1; $("drop").hidden = false; });
  addEventListener("dragleave", () => { depth -= 1; if (depth <= 0) $("drop").hidden = true; });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    $("drop").hidden = true;
    take(event.dataTransfer.files[0]);
  });
  addEventListener("keydown", (event) => {
    if ($("login").open || event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = document.activeElement.matches("input[type=text], select");
    if (event.key === "/" && !typing) { event.preventDefault(); $("query").focus(); $("query").select(); }
    else if (event.key === "Escape") escape();
    else move(event);
  });
}

async function start() {
  try {
    about = await (await ask("/api/about")).json();
  } catch (error) {
    fail(error);
    return;
  }
  offer();
  menus();
  await search();
}

bind();
recall();
start();
