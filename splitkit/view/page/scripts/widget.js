// @ts-check
// The picture as a widget of anywidget: border moves go to Python, plans come from there.
import {Ladder} from "./ladder.js";

/** Milliseconds after which a kernel that has not even begun to plan is reported: an idle one answers within 50. */
const PATIENCE = 5000;

export default {
  /** @param {{model: WidgetModel, el: HTMLElement}} given */
  render({model, el}) {
    const place = document.createElement("div"), note = document.createElement("p");
    note.setAttribute("role", "status");
    el.append(place, note);
    /** @type {Ladder | null} */
    let ladder = null;
    /** @type {number | null} */
    let next = null;
    let asked = false, timer = 0;
    // one request at a time; of those made meanwhile only the last one matters
    const ask = (/** @type {number} */ count) => {
      if (asked) { next = count; return; }
      asked = true;
      note.textContent = "planning…";
      timer = setTimeout(silent, PATIENCE);
      model.send({stages: count});
    };
    // a restarted kernel has lost this widget and never answers; a busy one answers later
    const silent = () => {
      asked = false;
      next = null;
      note.textContent = "Python does not answer: the kernel is busy, or it was restarted. If it was restarted, run the cell again.";
      if (ladder) ladder.showSide();
    };
    const answered = (/** @type {{planning?: number, refused?: string}} */ message) => {
      clearTimeout(timer);
      if (message.planning) { note.textContent = "planning…"; return; }
      asked = false;
      note.textContent = message.refused || "";
      // put the slider back to the plan's number of stages
      if (message.refused && ladder) ladder.showSide();
      if (!message.refused) { model.set("answers", model.get("answers") + 1); model.save_changes(); }
      if (next === null) return;
      const count = next;
      next = null;
      ask(count);
    };
    // return whether Python plans; it need not for the plan that it sent last
    const count = (/** @type {number} */ stages, /** @type {boolean} */ own) => {
      if (own && !asked) return false;
      ask(stages);
      return true;
    };
    const moved = (/** @type {number[]} */ borders) => {
      if (borders.join() === model.get("borders").join()) return;
      model.set("borders", [...borders]);
      model.save_changes();
    };
    const follow = () => {
      const borders = model.get("borders");
      // borders of another number of rows belong to a plan whose data is still to come
      if (!ladder || borders.at(-1) !== ladder.data.rows.length) return;
      if (ladder.borders.join() !== borders.join()) ladder.setBorders(borders);
    };
    const mount = () => {
      // a new picture has a new slider: without the focus, the next arrow key would go to the notebook
      const had = ladder !== null && ladder.slider.matches(":focus");
      if (ladder) ladder.destroy();
      ladder = new Ladder(model.get("data"), {height: model.get("height"), onplan: moved, oncount: count}).mount(place);
      if (had) ladder.slider.focus();
      follow();
    };
    /** @type {[string, (message: any) => void][]} */
    const events = [["change:data", mount], ["change:borders", follow], ["msg:custom", answered]];
    for (const [name, listener] of events) model.on(name, listener);
    mount();
    return () => {
      clearTimeout(timer);
      for (const [name, listener] of events) model.off(name, listener);
      if (ladder) ladder.destroy();
    };
  },
};
