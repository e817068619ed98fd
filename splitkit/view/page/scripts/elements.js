// @ts-check
// Creates elements of the page. Texts from models go through textContent only, so they cannot be markup.

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
