// SPDX-License-Identifier: Apache-2.0
// Elements, tables and numbers. All text goes through textContent: names of workers and models are not trusted.
import { soon } from './frames.js'

export const find = (id) => document.getElementById(id)

// Control characters and invisible characters of Unicode, such as those that reverse the direction of text, become
// their code: no name can change how the text around it is read. Line breaks remain: only titles have some.
const hidden = /[^\P{C}\n]|\p{Zl}|\p{Zp}/gu
export const visible = (text) => text.replace(hidden, (c) => `\\u{${c.codePointAt(0).toString(16)}}`)

// clip returns at most n characters of a text.
export const clip = (text, n = 300) => (text.length > n ? `${text.slice(0, n - 1)}…` : text)

// element makes an element with properties, attributes in properties.attributes, and children.
export function element(name, { attributes = {}, ...properties } = {}, ...children) {
  const e = Object.assign(document.createElement(name), properties)
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value)
  e.append(...children.map((c) => (typeof c === 'string' ? visible(c) : c)))
  return e
}

// svg makes an element of a drawing.
export function svg(name, attributes = {}, ...children) {
  const e = document.createElementNS('http://www.w3.org/2000/svg', name)
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value)
  e.append(...children)
  return e
}

// put writes a cell {text, value, tone, title, share} into an element, and only what has changed since the last call.
// value is the figure without rounding. tone is good, warn, bad, quiet or "": the text always says the same.
// share, from 0 to 1, draws a bar.
export function put(e, cell) {
  const old = e.shown ?? {}
  const { text = '–', value, tone = '', title = '', share } = cell
  if (text !== old.text) e.textContent = visible(text)
  if (value !== old.value) value === undefined ? delete e.dataset.value : (e.dataset.value = value)
  if (tone !== old.tone) tone ? (e.dataset.tone = tone) : delete e.dataset.tone
  if (title !== old.title) e.title = visible(title)
  if (share !== old.share) {
    e.classList.toggle('bar', share !== undefined)
    e.style.setProperty('--share', share === undefined ? 0 : Math.round(1000 * Math.min(1, share)) / 1000)
  }
  e.shown = { text, value, tone, title, share }
}

// The small charts in cells, in pixels.
const small = { width: 60, height: 18 }

// trace draws a small chart of points from 0 to the highest one; null is a gap.
function trace(path, points) {
  if (path.points === points) return
  path.points = points
  const known = points.filter((p) => p !== null)
  const top = Math.max(...known, 1e-9)
  const x = (i) => ((small.width * i) / Math.max(1, points.length - 1)).toFixed(1)
  let [text, gap] = ['', true]
  points.forEach((p, i) => {
    if (p !== null) text += `${gap ? 'M' : 'L'}${x(i)} ${(1 + (small.height - 2) * (1 - p / top)).toFixed(1)}${gap ? 'h.1' : ''}`
    gap = p === null
  })
  path.setAttribute('d', text || `M0 ${small.height - 1}H${small.width}`)
  path.classList.toggle('none', text === '')
}

const part = 10 // rows that a table writes at once
const inView = 20 // rows; a box shows fewer of them without scrolling

// Table keeps its rows and writes only cells that have changed, some rows in each frame. A box of limited height has the
// rows in view, until it is scrolled or has the pointer or the focus. columns are {name, field, show(item), left, open, points,
// spare, wrap}: left is for texts, which wrap if wrap is set, and open makes a button of the cell. points(item) are those
// of a small chart in the cell. A spare column is hidden while all of its figures are 0. The first column names the
// row. key(item) identifies an item, and strong(item) says whether its row is bold.
export class Table {
  constructor(table, caption, columns, key, strong = () => false) {
    Object.assign(this, { table, columns, key, strong, items: [], written: 0 })
    this.heads = columns.map((c) => element('th', { scope: 'col', className: c.left ? 'left' : '' }, c.name))
    this.body = table.createTBody()
    table.prepend(element('caption', { className: 'unseen' }, caption))
    table.createTHead().append(element('tr', {}, ...this.heads))
    this.empty = element('p', { className: 'note', hidden: true })
    table.after(this.empty)
    this.box = table.closest('.tall, .short')
    for (const event of ['scroll', 'pointerenter', 'pointerleave', 'focusin', 'focusout']) {
      this.box?.addEventListener(event, () => {
        this.scrolled = this.box.scrollTop > 0
        soon(this.write)
      })
    }
  }

  fill(items, none) {
    this.items = items
    this.columns.forEach((column, j) => {
      const unused = Boolean(column.spare) && !items.some((item) => column.show(item).value)
      if (this.heads[j].hidden === unused) return
      for (const row of this.table.rows) row.cells[j].hidden = unused
    })
    this.left = this.columns.filter((_, j) => this.heads[j].hidden).map((c) => c.name)
    this.table.hidden = items.length === 0
    this.table.ariaRowCount = items.length + 1 // with the heading
    put(this.empty, { text: none ?? 'None' })
    this.empty.hidden = items.length > 0
    this.written = 0
    this.write()
  }

  // write writes the next rows at once, and those behind them soon.
  write = () => {
    const { rows } = this.body
    const whole = !this.box || this.scrolled || this.box.matches(':hover, :focus-within')
    const count = whole ? this.items.length : Math.min(this.items.length, inView)
    while (rows.length > count) this.body.deleteRow(-1)
    const end = Math.min(count, this.written + part)
    for (; this.written < end; this.written++) this.writeRow(rows[this.written] ?? this.body.appendChild(this.row()), this.items[this.written])
    this.written = end
    if (end < count) soon(this.write)
  }

  writeRow(row, item) {
    const key = this.key(item)
    if (row.dataset.key !== key) row.dataset.key = key
    row.classList.toggle('strong', this.strong(item))
    this.columns.forEach((column, j) => {
      put(row.cells[j].target, column.show(item))
      if (column.points) trace(row.cells[j].path, column.points(item))
    })
  }

  row() {
    const row = element('tr')
    this.columns.forEach((column, i) => {
      const cell = i === 0 ? element('th', { scope: 'row' }) : element('td')
      if (column.left) cell.className = column.wrap ? 'left wrap' : 'left'
      cell.hidden = this.heads[i].hidden
      cell.target = cell
      if (column.open) {
        cell.target = element('button', { type: 'button', className: 'link' })
        cell.append(cell.target)
      } else if (column.points || column.wrap) {
        cell.target = element('span')
        cell.append(cell.target)
      }
      if (column.points) {
        cell.path = svg('path', { class: 'trace' })
        cell.prepend(svg('svg', { ...small, 'aria-hidden': true }, cell.path))
      }
      cell.target.dataset.field = column.field
      row.append(cell)
    })
    return row
  }
}

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 })
const three = new Intl.NumberFormat('en', { maximumSignificantDigits: 3 })
const four = new Intl.NumberFormat('en', { maximumSignificantDigits: 4 })

// exact shows a number with all its digits, for titles.
export const exact = (n) => (Number.isInteger(n) ? whole.format(n) : String(n))

// number shows a figure with at most four significant digits, and three from 10,000 on.
export function number(n) {
  const size = Math.abs(n)
  if (size < 1e4) return four.format(n)
  const [unit, name] = size < 999.5e3 ? [1e3, 'k'] : size < 999.5e6 ? [1e6, 'M'] : size < 999.5e9 ? [1e9, 'G'] : [1e12, 'T']
  return `${three.format(n / unit)} ${name}`
}

export const percent = (x) => `${(100 * x).toFixed(1)} %`

export const rate = (x) => (x < 10 ? x.toFixed(1) : number(Math.round(x)))

// milliseconds and duration show a length of time, given in ms and in ns.
export function milliseconds(ms) {
  const size = Math.abs(ms)
  if (size === 0) return '0 ms'
  if (size < 1) return `${three.format(1000 * ms)} µs`
  return size < 999.5 ? `${three.format(ms)} ms` : `${three.format(ms / 1000)} s`
}
export const duration = (ns) => milliseconds(ns / 1e6)

const times = new Intl.DateTimeFormat('en-GB', { timeStyle: 'medium' })
export const clock = (time) => times.format(new Date(time))

// ago shows how long before now, in ms, a time was.
export function ago(time, now) {
  const seconds = Math.max(0, (now - new Date(time)) / 1000)
  if (seconds < 60) return `${Math.floor(seconds)} s`
  return seconds < 5400 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`
}

// count, length and plain are the cells of a figure, of a time in ms, and of a text. The exact figure is in the title.
export const count = (n, more = {}) => {
  if (n === undefined) return {}
  const text = number(n)
  const all = exact(n)
  return { text, value: n, ...more, title: [text === all ? '' : all, more.title ?? ''].filter(Boolean).join(' ') }
}
export const length = (ms, more) => (ms === undefined ? {} : { text: milliseconds(ms), value: ms, title: `${ms} ms`, ...more })
export const plain = (text, more) => ({ text: text || '–', value: text, ...more })

// several shows a count with its noun.
export const several = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`

// workerName is the name that kvroute explain prints.
export const workerName = (w, name) => (name || String(w.worker_id)) + (w.dp_rank > 0 ? `/${w.dp_rank}` : '')
