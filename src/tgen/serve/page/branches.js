/* The tree of branches: each continues its prompt with a seed. */

export class Branches {
  /* `onSelect` receives the branch that is clicked. */
  constructor(box, onSelect) {
    this.box = box;
    this.onSelect = onSelect;
    this.clear();
  }

  clear() {
    this.roots = [];
    this.current = null;
    this.draw();
  }

  /* Add a branch to the one that it continues, or to none. */
  add(branch, parent) {
    Object.assign(branch, { children: [], parent });
    (parent ? parent.children : this.roots).push(branch);
    this.current = branch;
    this.draw();
  }

  select(branch) {
    this.current = branch;
    this.draw();
  }

  draw() {
    const list = (branches) => make('ul', {}, ...branches.map((branch) => {
      const button = make('button', {
        type: 'button', className: 'branch', 'aria-pressed': branch === this.current,
      }, branch.name, ' ', make('small', {}, `seed ${branch.seed ?? '…'}`));
      button.addEventListener('click', () => this.onSelect(branch));
      return make('li', {}, button, ...(branch.children.length ? [list(branch.children)] : []));
    }));
    this.box.replaceChildren(...(this.roots.length ? [list(this.roots)] : []));
  }
}
