// @ts-check
// Shows the tooltip beside the mouse.
import {duration, size} from "./units.js";

/**
 * @param {import("./picture.js").Picture<CommonData>} p
 * @param {Target | null} at
 * @param {MouseEvent} e
 */
export function showTip(p, at, e) {
  const {ops} = p, time = (/** @type {number} */ seconds) => duration(seconds, p.data.unit);
  let text = "";
  if (at && at.op !== undefined) text = `${ops.name[at.op]}  (${ops.op(at.op)})\n${ops.value(at.op)}  ${time(ops.seconds(at.op))}`;
  else if (at && at.row !== undefined) {
    const item = p.itemOf[at.row], price = p.priceOf(item.start, item.end);
    text = `${p.name(item)}\nforward ${time(price.forward)}${p.trains ? `, backward ${time(price.backward)}, saved ${size(price.saved)}` : ""}`;
  }
  p.tip.textContent = text;
  Object.assign(p.tip.style, {display: text ? "block" : "none", left: `${Math.min(e.offsetX + 14, p.main.clientWidth - 280)}px`, top: `${e.offsetY + 16}px`});
}
