// @ts-check
// Shows the tooltip beside the mouse.

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
