// The picture as a widget of anywidget: moves go to Python, plans come from there.
export default {
  render({model, el}) {
    const place = document.createElement("div"), note = document.createElement("p");
    note.setAttribute("role", "status");
    el.append(place, note);
    let ladder = null, asked = false, next = null;
    // one question at a time; of those that come meanwhile only the last matters
    const ask = count => {
      if (asked) { next = count; return; }
      asked = true;
      note.textContent = "planning…";
      model.send({stages: count});
    };
    const answered = message => {
      asked = false;
      note.textContent = message.refused || "";
      if (message.refused) ladder.showSide(); // the slider is again where the plan is
      if (!message.refused) { model.set("answers", model.get("answers") + 1); model.save_changes(); }
      if (next === null) return;
      const count = next;
      next = null;
      ask(count);
    };
    // whether Python plans; it need not for the plan that is there
    const count = (stages, own) => {
      if (own && !asked) return false;
      ask(stages);
      return true;
    };
    const moved = borders => {
      if (borders.join() === model.get("borders").join()) return;
      model.set("borders", [...borders]);
      model.save_changes();
    };
    const follow = () => {
      const borders = model.get("borders");
      if (borders.at(-1) !== ladder.data.rows.length) return; // of the plan that comes with them: then all is drawn anew
      if (ladder.borders.join() !== borders.join()) ladder.setBorders(borders);
    };
    const mount = () => {
      if (ladder) ladder.destroy();
      ladder = show(place, model.get("data"), {height: model.get("height"), onplan: moved, oncount: count});
      follow();
    };
    const events = [["change:data", mount], ["change:borders", follow], ["msg:custom", answered]];
    for (const [name, listener] of events) model.on(name, listener);
    mount();
    return () => {
      for (const [name, listener] of events) model.off(name, listener);
      ladder.destroy();
    };
  },
};
