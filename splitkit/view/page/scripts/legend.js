// @ts-check
// Says what each colour and mark of a picture means.
import {el} from "./elements.js";

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
