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
    /** @type {number | null} the number of stages that Python was asked for last, until it answers */
    let asked = null;
    /** @type {number | null} the number that it plans now; after a silence this may be an older one */
    let planning = null;
    // whether the user holds the slider with the mouse, and whether the model has a plan that is not drawn
    let timer = 0, isHeld = false, isNew = false;
    // one request at a time; of those made meanwhile only the last one matters
    const ask = () => {
      if (asked !== null || !ladder || ladder.wanted === null) return;
      asked = ladder.wanted;
      note.textContent = "planning…";
      timer = setTimeout(silent, PATIENCE);
      model.send({stages: asked});
    };
    // a restarted kernel has lost this widget and never answers; a busy one answers later
    const silent = () => {
      asked = null;
      note.textContent = "Python does not answer: the kernel is busy, or it was restarted. If it was restarted, run the cell again.";
      if (ladder) ladder.wanted = null;
      settle();
      putBack();
    };
    // put the slider back to the number of stages that are drawn
    const putBack = () => { if (ladder && asked === null && !isHeld) ladder.showSide(); };
    const answered = (/** @type {{planning?: number, planned?: number, refused?: string}} */ message) => {
      clearTimeout(timer);
      if (message.planning) { planning = message.planning; note.textContent = "planning…"; return; }
      const count = message.planned ?? planning ?? asked, isOld = asked !== null && count !== asked;
      planning = null;
      if (!message.refused) { model.set("answers", model.get("answers") + 1); model.save_changes(); }
      if (isOld) return;
      asked = null;
      note.textContent = message.refused || "";
      if (ladder && ladder.wanted !== count) ask();
      if (asked !== null) return;
      if (ladder) ladder.wanted = null;
      settle();
      // Jupyter may tell of this before it tells of the plan
      message.refused ? putBack() : setTimeout(putBack);
    };
    // return whether Python plans; it need not for the plan that it sent last
    const count = (/** @type {number} */ stages, /** @type {boolean} */ own) => {
      if (own && asked === null && !isNew) return false;
      ask();
      return true;
    };
    const moved = (/** @type {number[]} */ borders) => {
      if (isNew || borders.join() === model.get("borders").join()) return;
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
      isNew = false;
      // a new picture has a new slider: without the focus, the next arrow key would go to the notebook
      const had = ladder !== null && ladder.slider.matches(":focus");
      if (ladder) ladder.destroy();
      ladder = new Ladder(model.get("data"), {height: model.get("height"), onplan: moved, oncount: count}).mount(place);
      ladder.slider.addEventListener("pointerdown", () => { isHeld = true; });
      if (had) ladder.slider.focus();
      follow();
    };
    // a new picture has a new slider: as long as the user moves the old one or waits for another plan, it is not drawn
    const settle = () => {
      if (isHeld || asked !== null) return;
      if (isNew) mount(); else follow();
    };
    const release = () => {
      if (!isHeld) return;
      isHeld = false;
      settle();
      putBack();
    };
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, release);
    /** @type {[string, (message: any) => void][]} */
    const events = [["change:data", () => { isNew = true; settle(); }], ["change:borders", settle], ["msg:custom", answered]];
    for (const [name, listener] of events) model.on(name, listener);
    mount();
    return () => {
      clearTimeout(timer);
      for (const name of ["pointerup", "pointercancel"]) removeEventListener(name, release);
      for (const [name, listener] of events) model.off(name, listener);
      if (ladder) ladder.destroy();
    };
  },
};
