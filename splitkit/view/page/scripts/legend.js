// @ts-check
// Says what each colour and mark of a picture means.
import {el} from "./elements.js";

/** @typedef {[string, string, string]} Entry the class of the sample, its colour, and what it means */

/**
 * @param {Entry[]} entries
 * @param {boolean} open
 * @param {(open: boolean) => void} ontoggle
 */
export function legend(entries, open, ontoggle) {
  const box = el("details", undefined, {class: "legend", ontoggle: () => ontoggle(box.open)}), list = el("ul");
  box.open = open;
  for (const [kind, colour, text] of entries) {
    const line = el("li"), sample = el("i", undefined, {class: kind});
    sample.style.color = colour;
    line.append(sample, text);
    list.append(line);
  }
  box.append(el("summary", "legend"), list);
  return box;
}
