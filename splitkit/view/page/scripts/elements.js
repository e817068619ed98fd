// @ts-check
// Creates elements of the page, its legend and tooltips. Texts from models go through textContent only, so they cannot be markup.

/**
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {string} [text]
 * @param {Record<string, string | number | ((event: any) => void)>} [attributes] functions are listeners, with names such as "onclick"
 * @returns {HTMLElementTagNameMap[K]}
 */
export function el(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  // JupyterLab (Lumino) takes arrow keys and Enter away from a focused element that does not have this itself
  made.dataset.lmSuppressShortcuts = "true";
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) typeof value === "function" ? made.addEventListener(name.slice(2), value) : made.setAttribute(name, String(value));
  return made;
}
/**
 * Whether what is around the picture is dark: JupyterLab, marimo and VS Code say so, else the system.
 */
export function surroundedByDark() {
  const {body, documentElement: root} = document, light = body.dataset.jpThemeLight;
  if (light !== undefined) return light === "false";
  if ([body, root].some(element => element.classList.contains("dark") || element.classList.contains("vscode-dark"))) return true;
  return matchMedia("(prefers-color-scheme: dark)").matches;
}
/**
 * A secondary text in the side panel.
 * @param {string} text
 */
export const remark = text => el("p", text, {class: "mut"});
/**
 * The attributes of an element that can be pressed by mouse or by Enter.
 * @param {() => void} press
 */
export const pressed = press => ({tabindex: 0, onclick: press, onkeydown: (/** @type {KeyboardEvent} */ e) => { if (e.key === "Enter") press(); }});
/**
 * Mark the row of a table that is selected.
 * @param {HTMLTableRowElement} row
 */
export function mark(row) {
  row.classList.add("on");
  row.setAttribute("aria-current", "true");
}
/**
 * A table in the side panel.
 * @param {string} name what a screen reader says of the table: the heading above it
 * @param {string[]} titles
 * @param {HTMLTableRowElement[]} rows
 */
export function tableOf(name, titles, rows) {
  const table = el("table", undefined, {"aria-label": name}), head = el("thead"), body = el("tbody"), line = el("tr");
  line.append(...titles.map(title => el("th", title, {scope: "col"})));
  head.append(line);
  body.append(...rows);
  table.append(head, body);
  return table;
}
/**
 * @param {HTMLElement} tip
 * @param {HTMLElement} within what it must not leave
 * @param {string} text "" hides it
 * @param {MouseEvent} e
 */
export function showTip(tip, within, text, e) {
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  const right = within.clientWidth - tip.offsetWidth - 6, below = e.offsetY + 16, fits = below + tip.offsetHeight < within.clientHeight;
  tip.style.left = `${Math.max(4, Math.min(e.offsetX + 14, right))}px`;
  tip.style.top = `${fits ? below : Math.max(4, e.offsetY - tip.offsetHeight - 10)}px`;
}
/** @typedef {[string, string, string]} Entry the class of the sample, its colour, and what it means */

// what both pictures have
/** @type {Entry} */
export const ARROW = ["line", "var(--rib)", "read by the next box; an arc skips boxes"];
/** @type {Entry} */
export const RIBBON = ["ribbon", "var(--rib)", "saved for backward, as wide as its bytes"];
/** @type {Entry} */
export const LIMIT = ["line", "var(--bad)", "the memory limit; red figures are above it"];

/**
 * @param {{legendIsOpen: boolean}} p the picture, which remembers whether its legend is open
 * @param {Entry[]} entries
 */
export function legend(p, entries) {
  const box = el("details", undefined, {class: "legend", ontoggle: () => { p.legendIsOpen = box.open; }}), list = el("ul");
  box.open = p.legendIsOpen;
  for (const [kind, colour, text] of entries) {
    const line = el("li"), sample = el("i", undefined, {class: kind});
    sample.style.color = colour;
    line.append(sample, text);
    list.append(line);
  }
  box.append(el("summary", "legend"), list);
  return box;
}
