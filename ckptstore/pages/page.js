// The page of a store. Texts of the store are written as text nodes only; there is no innerHTML.
'use strict'

// --- documents --------------------------------------------------------------------------------

const inside = document.getElementById('data')
const documents = inside ? JSON.parse(inside.textContent).documents : null
const main = document.getElementById('main')

async function get (name, params = {}) {
  if (documents) {
    const key = [name, ...Object.values(params)].join(' ')
    const found = Object.hasOwn(documents, key) ? documents[key] : null
    if (!found) throw new Error('This report does not contain that; the served page and the command line do.')
    if (found.error) throw new Error(`${found.error} ${found.hint ?? ''}`)
    return found
  }
  // location.origin has no credentials: fetch refuses an address that was opened with a password
  const answer = await fetch(new URL(`page/${name}.json?${new URLSearchParams(params)}`, location.origin + location.pathname))
  const found = await answer.json()
  if (!answer.ok) throw new Error(`${found.error} ${found.hint ?? ''}`)
  return found
}

// --- elements and texts -----------------------------------------------------------------------

function fill (element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value)
    else if (value === true) element.setAttribute(name, '')
    else if (value !== false && value != null) element.setAttribute(name, value)
  }
  element.append(...children.flat(9).filter(one => one != null && one !== false))
  return element
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children)
const s = (tag, attributes, ...children) =>
  fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children)

const to = (view, params = {}) => `#${view}?${new URLSearchParams(params)}`
const link = (text, view, params, more) => h('a', { href: to(view, params), ...more }, text)
const versionLink = one => link(`${one.run}@${one.step}`, 'version', { ref: one.id })
const count = value => value.toLocaleString('en')
const nouns = (value, noun) => `${count(value)} ${noun}${value === 1 ? '' : 's'}`
const metric = value => typeof value === 'number' ? String(Number(value.toPrecision(6))) : value ?? '–'

function bytes (size) {
  let value = size
  for (const unit of ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB']) {
    if (value < 999.5 || unit === 'EiB') {
      return `${value.toFixed(unit === 'B' ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`
    }
    value /= 1024
  }
}
function age (ms, now = made) {
  if (ms == null) return '–'
  let value = Math.max(0, now - ms) / 1000
  for (const [unit, size, most] of [['s', 1, 120], ['m', 60, 120], ['h', 3600, 48], ['d', 86400, 730]]) {
    if (value < size * most) return `${Math.floor(value / size)}${unit}`
  }
  return `${Math.floor(value / 31557600)}y`
}
const time = ms => new Date(ms).toISOString().slice(0, 16).replace('T', ' ')
const DELETED = 1, ABANDONED = 2, PINNED = 4, VERIFIED = 8, WEIGHTS = 16, RECORD = 32, DAMAGED = 64
const FLAGS = { deleted: DELETED, abandoned: ABANDONED, pinned: PINNED, verified: VERIFIED, 'weights only': WEIGHTS, 'record only': RECORD, damaged: DAMAGED }
const states = flags => Object.keys(FLAGS).filter(name => flags & FLAGS[name])

// Columns: [title, cell, kind]; kinds: number, name, wide (left out on a phone), row (its header).
function table (caption, columns, rows, more = {}) {
  const kinds = kind => (kind ?? '').split(' ').filter(one => one !== 'row').join(' ') || null
  const head = columns.map(([title, , kind]) => h('th', { scope: 'col', class: kinds(kind) }, title))
  const body = h('tbody')
  const shown = more.most ?? 200
  const add = part => body.append(...part.map(row => h('tr', {}, columns.map(([, cell, kind]) =>
    (kind ?? '').includes('row') ? h('th', { scope: 'row', class: kinds(kind) }, cell(row)) : h('td', { class: kinds(kind) }, cell(row))))))
  add(rows.slice(0, shown))
  const rest = rows.length > shown && h('button', { onclick: event => { add(rows.slice(shown)); event.target.remove() } }, `Show ${count(rows.length - shown)} more`)
  return h('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption },
    h('table', {}, h('caption', { class: more.quiet ? 'hidden' : null }, caption), h('thead', {}, h('tr', {}, head)), body), rest)
}
function bar (value, most) {
  const one = h('span', { class: 'bar', 'aria-hidden': 'true' })
  one.style.width = `${100 * value / (most || 1)}%`
  return one
}
function facts (pairs) {
  return h('dl', {}, pairs.filter(([, value]) => value != null && value !== '' && value !== false && [value].flat(9).length).map(([name, value]) => [h('dt', {}, name), h('dd', {}, value)]))
}
const note = (text, bad) => h('p', { class: bad ? 'note error' : 'note', role: bad ? 'alert' : null }, text)
function say (text) { document.getElementById('said').textContent = text }

// --- curves -----------------------------------------------------------------------------------

function spark (values, label) {
  const finite = values.filter(one => one != null)
  if (!finite.length) return ''
  const low = Math.min(...finite), span = Math.max(...finite) - low || 1
  let pen = 'M'
  const path = values.map((value, at) => {
    if (value == null) { pen = 'M'; return '' }
    const part = `${pen}${(at / (values.length - 1 || 1) * 96 + 2).toFixed(1)} ${(18 - (value - low) / span * 16).toFixed(1)}`
    pen = 'L'
    return part
  }).join('')
  return s('svg', { class: 'spark', viewBox: '0 0 100 20', preserveAspectRatio: 'none', role: 'img', 'aria-label': `${label} from ${metric(finite[0])} to ${metric(finite.at(-1))}` },
    s('path', { class: 'line s0', d: path, 'vector-effect': 'non-scaling-stroke' }))
}

function ticks (low, high, most) {
  const raw = (high - low) / most || 1
  const size = 10 ** Math.floor(Math.log10(raw))
  const step = [1, 2, 5, 10].map(one => one * size).find(one => one >= raw)
  const found = []
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(Number((at * step).toPrecision(12)))
  return found
}

const SHAPES = {
  best: 'M0-8 2.4-2.6 8-2.4 3.6 1.2 5 7 0 3.8-5 7-3.6 1.2-8-2.4-2.4-2.6Z',
  gone: 'M-4-4 4 4M4-4-4 4',
  reduced: 'M-4-4H4V4H-4Z',
  number: 'M-5-4H5L0 5Z'
}

class Chart {
  constructor (series, name) {
    this.series = series
    this.name = name
    this.tip = h('div', { class: 'tip', hidden: true })
    this.svg = s('svg', { tabindex: 0, role: 'application', 'aria-label': `${name} over steps. Arrow keys go from version to version, Enter opens one, plus and minus zoom, 0 shows all.`, height: 360 })
    this.figure = h('figure', {}, this.svg, this.tip)
    this.range = null
    this.at = -1
    this.collect()
    this.full = this.extent()
    this.listen()
    new ResizeObserver(() => this.draw()).observe(this.figure)
  }

  collect () {
    this.points = []
    const known = new Map()
    this.series.forEach((one, color) => {
      const { columns, values, tags, fates, best } = one.doc
      const column = values[this.name] ?? []
      columns.id.forEach((id, at) => {
        if (column[at] == null) return
        const point = { id, one, color, at, x: columns.step[at], y: column[at], flags: columns.flags[at], level: columns.level[at], tags: tags[at] ?? [], fate: fates[at], best: best[this.name] === id, ends: true }
        point.drawn = typeof point.y === 'number'
        known.set(id, point)
        this.points.push(point)
      })
    })
    for (const point of this.points) {
      const { columns } = point.one.doc
      let above = columns.above[point.at]
      while (above >= 0 && !known.get(columns.id[above])?.drawn) above = columns.above[above]
      point.before = above >= 0 ? known.get(columns.id[above]) : known.get(point.one.doc.origin?.id)
      if (point.before && point.before.color === point.color) point.before.ends = false
    }
    this.points.sort((a, b) => a.x - b.x)
  }

  extent () {
    const steps = this.points.map(point => point.x)
    const low = steps.reduce((a, b) => Math.min(a, b), Infinity), high = steps.reduce((a, b) => Math.max(a, b), -Infinity)
    const space = (high - low) * 0.02 || 1
    return steps.length ? [low - space, high + space] : [0, 1]
  }

  draw () {
    const width = this.figure.clientWidth || 800, height = 360
    const box = { left: 62, right: 28, top: 26, bottom: 34 }
    const [x0, x1] = this.range ?? this.full
    const shown = this.points.filter(point => point.x >= x0 && point.x <= x1)
    const values = shown.filter(point => point.drawn).map(point => point.y)
    let y0 = values.reduce((a, b) => Math.min(a, b), Infinity), y1 = values.reduce((a, b) => Math.max(a, b), -Infinity)
    if (!values.length) [y0, y1] = [0, 1]
    const space = (y1 - y0) * 0.06 || Math.abs(y0) * 0.05 || 1
    y0 -= space; y1 += space
    this.x = step => box.left + (step - x0) / (x1 - x0) * (width - box.left - box.right)
    this.step = x => x0 + (x - box.left) / (width - box.left - box.right) * (x1 - x0)
    this.y = value => height - box.bottom - (value - y0) / (y1 - y0) * (height - box.top - box.bottom)
    const place = point => `${this.x(point.x).toFixed(1)} ${point.drawn ? this.y(point.y).toFixed(1) : box.top}`
    const parts = []
    for (const at of ticks(y0, y1, 5)) {
      parts.push(s('path', { class: 'axis', d: `M${box.left} ${this.y(at)}H${width - box.right}` }), s('text', { class: 'soft', x: box.left - 8, y: this.y(at) + 4, 'text-anchor': 'end' }, metric(at)))
    }
    for (const at of ticks(x0, x1, Math.max(2, width / 130))) {
      parts.push(s('text', { class: 'soft', x: this.x(at), y: height - box.bottom + 18, 'text-anchor': 'middle' }, count(at)))
    }
    parts.push(s('text', { class: 'soft', x: width - box.right, y: height - 2, 'text-anchor': 'end' }, 'step'), s('text', { x: 4, y: 14 }, this.name))
    parts.push(s('clipPath', { id: 'plot' }, s('rect', { x: box.left - 8, y: 0, width: width - box.left - box.right + 16, height: height - box.bottom + 8 })))
    const inner = s('g', { 'clip-path': 'url(#plot)' })
    parts.push(inner)
    const paths = {}
    for (const point of this.points) {
      if (!point.drawn) continue
      const left = point.flags & ABANDONED
      const key = `${left || point.before?.color !== point.color ? 'gone' : 'line'} s${point.color}`
      if (point.before) (paths[key] ??= []).push(`M${place(point.before)}L${place(point)}`)
      let target = point.before
      while (target && target.flags & ABANDONED) target = target.before
      if (left && point.ends && target) {
        const [from, end] = [place(point), place(target)]
        ;(paths[`back s${point.color}`] ??= []).push(`M${from}Q${(this.x(point.x) + this.x(target.x)) / 2} ${Math.max(box.top, Math.min(this.y(point.y), this.y(target.y)) - 40)} ${end}`)
      }
    }
    for (const [key, d] of Object.entries(paths)) inner.append(s('path', { class: key, d: d.join('') }))
    const dots = shown.length * 6 < width
    for (const point of shown) {
      const move = { transform: `translate(${place(point)})` }
      const kind = this.kind(point)
      if (!point.drawn) inner.append(s('path', { ...move, d: SHAPES.number, class: `f${point.color}` }))
      else if (kind === 'gone' || kind === 'reduced') {
        if (dots || point.best || point.tags.length) inner.append(s('path', { ...move, d: SHAPES[kind], class: `s${point.color} open`, 'stroke-width': 1.6 }))
      } else if (dots) inner.append(s('circle', { ...move, r: 3, class: point.flags & ABANDONED ? `s${point.color} open` : `f${point.color}` }))
      if (point.best) inner.append(s('path', { ...move, d: SHAPES.best, class: `f${point.color}`, stroke: 'currentColor', 'stroke-width': 0.8 }))
    }
    let last = -99
    for (const point of shown.filter(one => one.drawn && one.tags.length)) {
      const x = this.x(point.x)
      if (x - last < 60) continue
      last = x
      inner.append(s('path', { class: 'axis', d: `M${place(point)}V${this.y(point.y) - 16}` }), s('text', { x, y: this.y(point.y) - 20, 'text-anchor': x > width - 80 ? 'end' : x < 120 ? 'start' : 'middle' }, point.tags.slice(0, 2).join(', ').slice(0, 24)))
    }
    this.cursor = s('path', { class: 'cursor' })
    this.picked = s('circle', { r: 6, fill: 'none', stroke: 'currentColor', 'stroke-width': 1.5, visibility: 'hidden' })
    this.area = s('rect', { class: 'range', y: box.top, height: height - box.top - box.bottom, width: 0 })
    this.box = { ...box, width, height }
    this.svg.replaceChildren(...parts, this.cursor, this.area, this.picked)
    this.svg.setAttribute('viewBox', `0 0 ${width} ${height}`)
    this.shown = shown
  }

  kind (point) {
    const fate = point.fate?.[0]
    if (point.flags & DELETED || fate === 'gone') return 'gone'
    return point.flags & (WEIGHTS | RECORD) || fate ? 'reduced' : 'whole'
  }

  pick (point) {
    this.at = point ? this.points.indexOf(point) : -1
    this.tip.hidden = !point
    if (!point) { this.picked.setAttribute('visibility', 'hidden'); this.cursor.setAttribute('d', ''); return }
    const x = this.x(point.x), y = point.drawn ? this.y(point.y) : this.box.top
    this.picked.setAttribute('visibility', 'visible')
    this.picked.setAttribute('cx', x); this.picked.setAttribute('cy', y)
    this.cursor.setAttribute('d', `M${x} ${this.box.top}V${this.box.height - this.box.bottom}`)
    const fate = point.fate && (point.fate[0] === 'gone' ? 'retention would delete it' : `retention would keep: ${point.fate[0]}`)
    const lines = [`${point.one.doc.run}@${point.x}  #${point.id.slice(0, 8)}`, `${this.name} ${metric(point.y)}${point.best ? ', the best' : ''}`,
      [...states(point.flags), ...point.tags.map(tag => `tag ${tag}`)].join(', '), fate, `${age(point.one.doc.columns.at_ms[point.at])} ago`].filter(Boolean)
    this.tip.replaceChildren(...lines.map((text, at) => h('p', {}, at ? text : h('strong', {}, text))))
    this.tip.style.left = `${Math.min(Math.max(0, x - 70), Math.max(0, this.box.width - 190))}px`
    this.tip.style.top = `${y > 170 ? y - 30 - 22 * lines.length : y + 16}px`
    say(lines.join(', '))
  }

  near (event) {
    const box = this.svg.getBoundingClientRect()
    const [x, y] = [event.clientX - box.left, event.clientY - box.top]
    let found = null, least = 60 ** 2
    for (const point of this.shown) {
      const away = (this.x(point.x) - x) ** 2 + ((point.drawn ? this.y(point.y) : this.box.top) - y) ** 2
      if (away < least) [found, least] = [point, away]
    }
    return { x, found }
  }

  zoom (low, high) {
    const [from, end] = this.full
    const width = Math.min(high - low, end - from)
    if (!(width > 0)) return
    low = Math.max(from, Math.min(low, end - width))
    this.range = width >= end - from ? null : [low, low + width]
    this.pick(null)
    this.draw()
    clearTimeout(this.later)
    this.later = setTimeout(() => this.refine(), 250)
  }

  // A long run comes thinned out: what is looked at closely is asked for again.
  async refine () {
    if (documents) return
    const [low, high] = (this.range ?? [0, 0]).map(one => Math.max(0, Math.floor(one)))
    for (const one of this.series) {
      if (one.doc.versions_count === one.doc.columns.id.length && !one.part) continue
      one.part = Boolean(this.range)
      one.doc = await get('run', this.range ? { run: one.doc.run, low, high: high + 1 } : { run: one.doc.run })
    }
    this.collect()
    this.draw()
  }

  listen () {
    const svg = this.svg
    let start = null
    svg.addEventListener('pointerdown', event => { start = this.near(event).x })
    svg.addEventListener('pointermove', event => {
      const { x, found } = this.near(event)
      if (start !== null && event.buttons && event.pointerType === 'mouse' && Math.abs(x - start) > 5) {
        this.pick(null)
        this.area.setAttribute('x', Math.min(x, start)); this.area.setAttribute('width', Math.abs(x - start))
      } else if (found !== this.points[this.at]) this.pick(found)
    })
    svg.addEventListener('pointerup', event => {
      const { x, found } = this.near(event)
      if (start !== null && Math.abs(x - start) > 5 && event.pointerType === 'mouse') this.zoom(...[this.step(start), this.step(x)].sort((a, b) => a - b))
      else if (found && start !== null) location.hash = to('version', { ref: found.id })
      start = null
    })
    svg.addEventListener('pointerleave', () => { start = null; this.pick(null) })
    svg.addEventListener('dblclick', () => this.zoom(...this.full))
    svg.addEventListener('wheel', event => {
      event.preventDefault()
      this.scale(event.deltaY > 0 ? 1.25 : 0.8, this.step(this.near(event).x))
    }, { passive: false })
    svg.addEventListener('keydown', event => {
      const moves = { ArrowRight: 1, ArrowLeft: -1 }
      const scales = { '+': 0.8, '=': 0.8, '-': 1.25, 0: 99 }
      if (event.key in moves && this.shown.length) {
        const next = this.shown.indexOf(this.points[this.at]) + moves[event.key]
        this.pick(this.shown[(next + this.shown.length) % this.shown.length])
      } else if (event.key in scales) this.scale(scales[event.key], this.points[this.at]?.x)
      else if (event.key === 'Enter' && this.at >= 0) location.hash = to('version', { ref: this.points[this.at].id })
      else return
      event.preventDefault()
    })
  }

  scale (by, middle) {
    const [low, high] = this.range ?? this.full
    const at = middle ?? (low + high) / 2
    this.zoom(at - (at - low) * by, at + (high - at) * by)
  }
}

function legend (chart) {
  const sign = (kind, text) => h('li', {}, s('svg', { viewBox: '0 0 26 12', 'aria-hidden': 'true' }, kind), text)
  const line = name => s('path', { class: name, d: 'M1 6H25' })
  const shape = (name, more) => s('path', { d: SHAPES[name], transform: 'translate(13 6) scale(.8)', class: more })
  const has = test => chart.points.some(test)
  return h('ul', { class: 'legend', 'aria-label': 'Legend' },
    chart.series.map((one, color) => sign(line(`line s${color}`), one.doc.run)),
    has(point => point.best) && sign(shape('best', 'f0'), 'best'),
    has(point => point.flags & ABANDONED) && [sign(line('gone s0'), 'abandoned, or forked from'), sign(line('back s0'), 'rolled back')],
    has(point => chart.kind(point) === 'reduced') && sign(shape('reduced', 's0 open'), 'a part is kept, or would be by retention'),
    has(point => chart.kind(point) === 'gone') && sign(shape('gone', 's0'), 'deleted, or would be by retention'),
    has(point => !point.drawn) && sign(shape('number', 'f0'), 'NaN or infinite'))
}

// --- views ------------------------------------------------------------------------------------

let made = Date.now()

function head (doc) {
  document.getElementById('store').textContent = doc.url
  document.getElementById('made').textContent = `${documents ? `As of ${time(doc.at_ms)} UTC, ` : ''}commit ${count(doc.commits)}, store ${doc.id.slice(0, 8)}`
}

async function runs () {
  const doc = await get('overview')
  head(doc)
  const chosen = new Set()
  const together = h('button', { disabled: true, onclick: () => { location.hash = '#run?' + new URLSearchParams([...chosen].map(name => ['run', name])) } }, 'Show chosen runs together')
  const choose = run => h('input', {
    type: 'checkbox',
    'aria-label': `Choose ${run.name}`,
    onchange: event => { chosen[event.target.checked ? 'add' : 'delete'](run.name); together.disabled = !chosen.size || chosen.size > 6 }
  })
  const place = h('div')
  const draw = text => place.replaceChildren(table('Runs, saved last first', [
    ['', choose], ['Run', run => [link(run.name, 'run', { run: run.name }), run.origin && h('div', { class: 'soft' }, 'from ', versionLink(run.origin))], 'row name'],
    ['Curve', run => spark(run.spark, run.metric)],
    ['Best', run => run.best.slice(0, 3).map(one => h('div', {}, `${one.metric} ${metric(one.value)} `, link(`@${one.step}`, 'version', { ref: one.id })))],
    ['Last step', run => run.head ? link(count(run.head.step), 'version', { ref: run.head.id }) : '–', 'number'],
    ['Age', run => age(run.saved_ms), 'number'],
    ['Versions', run => count(run.versions), 'number wide'], ['Stored', run => bytes(run.stored_bytes), 'number wide']
  ], doc.runs.filter(run => run.name.toLowerCase().includes(text.toLowerCase())), { quiet: true }))
  draw('')
  return [h('h1', {}, `${nouns(doc.versions_count, 'version')} in ${nouns(doc.runs_count, 'run')}`),
    h('div', { class: 'tools' }, h('label', {}, 'Filter ', h('input', { type: 'search', oninput: event => draw(event.target.value) })), together),
    place, doc.runs.length < doc.runs_count && !documents && note(`These are the ${count(doc.runs.length)} runs that were saved last; ckptstore ls lists all.`)]
}

async function run (params) {
  const docs = await Promise.all(params.getAll('run').slice(0, 6).map(name => get('run', { run: name })))
  const names = [...new Set(docs.flatMap(doc => Object.keys(doc.metrics)))]
  const having = name => docs.filter(doc => name in doc.metrics).length
  names.sort((a, b) => having(b) - having(a))
  const place = h('div')
  const draw = name => {
    const chart = new Chart(docs.map(doc => ({ doc })), name)
    const button = (label, text, act) => h('button', { 'aria-label': label, onclick: act }, text)
    place.replaceChildren(h('div', { class: 'tools' }, select,
      h('span', {}, button('Zoom in', '+', () => chart.scale(0.6)), ' ', button('Zoom out', '−', () => chart.scale(1.7)), ' ', button('Show all steps', 'All', () => chart.zoom(...chart.full))),
      h('span', { class: 'soft wide' }, 'drag or wheel: zoom; click: open the version')), chart.figure, legend(chart))
    chart.draw()
  }
  const select = h('label', {}, 'Metric ', h('select', { onchange: event => draw(event.target.value) },
    names.map(name => h('option', { value: name }, name, { min: ' (lower is better)', max: ' (higher is better)' }[docs.map(doc => doc.metrics[name]).find(Boolean)] ?? ''))))
  if (names.length) draw(names[0])
  else place.append(note('No version has a metric.'))
  const rows = docs.flatMap(doc => doc.columns.id.map((id, at) => ({ doc, id, at, run: doc.run, step: doc.columns.step[at] }))).reverse()
  const first = docs[0]
  return [h('h1', {}, docs.map(doc => doc.run).join(', ')),
    docs.map(doc => facts([[docs.length > 1 ? doc.run : 'Versions', [nouns(doc.versions_count, 'version'), doc.origin && [' from ', versionLink(doc.origin)], doc.head && [', ', link('latest', 'version', { ref: doc.head })],
      doc.versions_count > doc.columns.id.length && `; ${count(doc.columns.id.length)} are drawn: all where something happens, and the extremes between them`]],
    ['Retention', docs.length > 1 ? null : doc.policy || 'no policy'], ['Retention refuses', doc.refused]])),
    place, h('h2', {}, 'Versions'),
    table('Versions, newest first', [
      ...(docs.length > 1 ? [['Run', row => row.run, 'name']] : []), ['Step', row => link(count(row.step), 'version', { ref: row.id }), 'row number'],
      ['Id', row => h('code', {}, row.id.slice(0, 8)), 'wide'], ['Age', row => age(row.doc.columns.at_ms[row.at]), 'number'],
      ...names.slice(0, 4).map((name, place) => [name, row => `${metric(row.doc.values[name]?.[row.at])}${row.doc.best[name] === row.id ? ' best' : ''}`, place ? 'number wide' : 'number']),
      ['Size', row => bytes(row.doc.columns.logical_bytes[row.at]), 'number wide'], ['Stored', row => bytes(row.doc.columns.stored_bytes[row.at]), 'number wide'],
      ['State', row => [row.id === row.doc.head && 'latest', ...states(row.doc.columns.flags[row.at])].filter(Boolean).join(', ')],
      ['Tags', row => (row.doc.tags[row.at] ?? []).map(tag => [h('span', { class: 'tag' }, tag), ' '])],
      ['Retention would', row => row.doc.fates[row.at] ? `${row.doc.fates[row.at][0] === 'gone' ? 'delete' : `keep ${row.doc.fates[row.at][0]}`}: ${row.doc.fates[row.at][1]}` : first.policy ? 'keep' : '–', 'wide']
    ], rows, { most: 100, quiet: true })]
}

async function lineage () {
  const doc = await get('lineage')
  const lanes = new Map()
  const lane = doc.id.map((id, at) => {
    const before = doc.above[at]
    let key = doc.run[at]
    if (doc.flags[at] & ABANDONED) key = before >= 0 && doc.flags[before] & ABANDONED && doc.run[before] === key ? laneKey[before] : `${key}  ${id}`
    laneKey[at] = key
    if (!lanes.has(key)) lanes.set(key, lanes.size)
    return lanes.get(key)
  })
  laneKey.length = 0
  const low = Math.min(...doc.step, 0), high = doc.step.reduce((a, b) => Math.max(a, b), 1)
  const width = Math.max(640, Math.min(1400, main.clientWidth - 40)), left = 150
  const x = at => left + (doc.step[at] - low) / (high - low) * (width - left - 60), y = at => 30 + lane[at] * 44
  const parts = []
  doc.id.forEach((_, at) => {
    const before = doc.above[at]
    if (before < 0) return
    const [a, b, c, d] = [x(before), y(before), x(at), y(at)]
    parts.push(s('path', { class: `${doc.flags[at] & ABANDONED ? 'gone' : 'line'} s${lane[at] % 6}`, d: b === d ? `M${a} ${b}H${c}` : `M${a} ${b}V${(b + d) / 2}Q${a} ${d} ${Math.min(a + 24, c)} ${d}H${c}` }))
  })
  let last = {}
  doc.id.forEach((id, at) => {
    const text = [`${doc.run[at]}@${doc.step[at]}`, ...doc.marks[at], ...states(doc.flags[at])].join(', ')
    const label = doc.marks[at].find(mark => mark.startsWith('tag '))?.slice(4) ?? (doc.marks[at][0] === 'head' ? 'latest' : '')
    parts.push(s('a', { href: to('version', { ref: id }), 'aria-label': text }, s('title', {}, text),
      s('circle', { cx: x(at), cy: y(at), r: doc.marks[at].length ? 6 : 4, class: doc.flags[at] & (ABANDONED | DELETED | RECORD) ? `open s${lane[at] % 6}` : `f${lane[at] % 6}` })))
    if (label && x(at) - (last[lane[at]] ?? -99) > 50) { parts.push(s('text', { x: x(at), y: y(at) - 10, 'text-anchor': 'middle' }, label.slice(0, 16))); last[lane[at]] = x(at) }
  })
  for (const [key, at] of lanes) {
    const [name, id] = key.split('  ')
    parts.push(s('text', { x: 0, y: 34 + at * 44, class: id ? 'soft' : null }, id ? 'abandoned' : name.length > 20 ? `${name.slice(0, 19)}…` : name))
  }
  const height = 50 + lanes.size * 44
  const rows = doc.id.map((id, at) => ({ id, at, run: doc.run[at], step: doc.step[at] }))
  return [h('h1', {}, 'Lineage'), h('p', { class: 'soft' }, 'Versions where something happens: starts, forks, rollbacks, tags, best and latest. Filled: on the line of its run. Open: abandoned, deleted, or a record only.'),
    h('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'Graph' }, s('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'group', 'aria-label': `Lineage of ${nouns(doc.runs_count, 'run')}` }, parts)),
    h('details', {}, h('summary', {}, 'As a table'), table('Versions of the graph', [
      ['Version', versionLink, 'row'], ['Continues', row => doc.above[row.at] < 0 ? '–' : [versionLink(rows[doc.above[row.at]]), doc.between[row.at] ? `, ${doc.between[row.at]} between` : '']],
      ['What', row => [...doc.marks[row.at], ...states(doc.flags[row.at])].join(', ')]], rows, { quiet: true }))]
}
const laneKey = []

async function version (params) {
  const ref = params.get('ref') ?? ''
  const doc = await get('version', { ref }).catch(error => documents ? fromColumns(ref, error) : Promise.reject(error))
  const one = doc.version
  const tags = [one.head && 'latest', ...one.tags].filter(Boolean)
  const state = ['abandoned', 'pinned', 'verified', 'damaged', 'deleted'].filter(name => one[name])
  const kept = doc.retention
  const sections = [h('h1', {}, `${one.run}@${one.step} `, h('code', { class: 'soft' }, `#${one.id.slice(0, 8)}`)),
    doc.thin && note('The report contains the tensors of the latest and the best versions; ckptstore show prints those of this one.'),
    facts([['Run', link(one.run, 'run', { run: one.run })], ['Id', h('code', {}, one.id)], ['Saved', `${time(Date.parse(one.created_at))} UTC, ${age(Date.parse(one.created_at))} ago`],
      ['Tags', tags.map(tag => [h('span', { class: 'tag' }, tag), ' '])], ['State', [one.level === 'full' ? 'whole' : `${one.level} kept`, ...state].join(', ')],
      ['Continues', doc.ancestors.slice(0, 3).map((each, at) => [at ? ' ← ' : '', versionLink(each)])], ['Continued by', doc.children.map((each, at) => [at ? ', ' : '', versionLink(each)])],
      ['Compare', [doc.ancestors[0] && link('with the one before', 'diff', { first: doc.ancestors[0].id, second: one.id }), ' ', link('as first', 'diff', { first: one.id }), ' ', link('as second', 'diff', { second: one.id })]],
      ['Retention', kept && [kept.refused ? `refuses: ${kept.refused}` : !kept.policy ? 'no policy: kept' : `would ${kept.fate === 'gone' ? 'delete it' : kept.fate === one.level ? 'keep it' : `keep ${kept.fate}`}: ${kept.reasons.join(', ')}`, kept.policy && h('div', { class: 'soft' }, kept.policy)]],
      ['Frees', kept?.reclaimable_bytes ? `at most ${bytes(kept.reclaimable_bytes)}` : '']])]
  const metrics = Object.entries(one.metrics)
  if (metrics.length) sections.push(h('h2', {}, 'Metrics'), table('Metrics', [['Metric', row => row[0], 'row name'], ['Value', row => metric(row[1]), 'number'], ['Better', row => doc.directions[row[0]] ?? '–'], ['', row => one.best.includes(row[0]) ? 'best of the run' : '']], metrics, { quiet: true }))
  if (doc.thin) return sections
  const roles = Object.entries(one.roles)
  sections.push(h('h2', {}, 'Bytes'), table('Bytes by role', [['Role', row => row[0], 'row'], ['In memory', row => bytes(row[1].logical_bytes), 'number'], ['New', row => bytes(row[1].new_bytes), 'number'], ['Stored', row => bytes(row[1].stored_bytes), 'number'], ['', row => bar(row[1].logical_bytes, one.logical_bytes), 'bars']], [...roles, ['total', one]], { quiet: true }))
  sections.push(h('h2', {}, 'Tensors'), doc.unread ? note(doc.unread) : tensors(doc, one.id))
  const { witness, ...metadata } = one.metadata
  if (Object.keys(metadata).length) sections.push(h('h2', {}, 'Metadata'), h('pre', { class: 'mono scroll', tabindex: 0 }, JSON.stringify(metadata, null, 2)))
  sections.push(h('h2', {}, 'Receipt'), table('What the save took', [['Entry', row => row[0].replace(/_(bytes_per_s|bytes|s|count)$/, '').replaceAll('_', ' '), 'row'], ['', row => receipt(...row), 'number']],
    [...(doc.codec ? [['codec', doc.codec]] : []), ...Object.entries(one.receipt).filter(([name]) => !name.startsWith('auto_'))], { quiet: true }))
  sections.push(h('h2', {}, 'Where it lies'), facts([['Manifest', one.level === 'record' ? 'none' : [h('code', {}, one.manifest.key), ` ${bytes(one.manifest.bytes)}`]], ['Commit', count(one.commit)], ['Content', h('code', {}, one.content)],
    ['Replicas', doc.replicas.map(each => h('div', {}, `${each.name} at ${each.url}`))]]),
  doc.packs && table(`The largest of ${nouns(doc.packs_count, 'pack')}`, [['Pack', row => h('code', {}, row.key), 'row name'], ['Bytes for this version', row => bytes(row.bytes), 'number']], doc.packs, { most: 10 }))
  return sections
}

function receipt (name, value) {
  if (typeof value !== 'number') return value
  if (name.endsWith('bytes_per_s')) return `${bytes(value)}/s`
  if (name.endsWith('_bytes')) return bytes(value)
  return name.endsWith('_s') ? `${metric(Number(value.toPrecision(3)))} s` : metric(value)
}

// What a report knows of a version whose document it does not hold.
function fromColumns (ref, error) {
  for (const doc of Object.values(documents)) {
    const at = doc.columns?.id.indexOf(ref) ?? -1
    if (at < 0) continue
    const values = Object.entries(doc.values).filter(([, column]) => column[at] != null)
    const above = doc.columns.above[at]
    const fate = doc.fates[at]
    return {
      thin: true,
      directions: doc.metrics,
      children: [],
      ancestors: above < 0 ? [] : [{ id: doc.columns.id[above], run: doc.run, step: doc.columns.step[above] }],
      retention: { policy: doc.policy, refused: doc.refused, fate: fate?.[0] ?? doc.columns.level[at], reasons: fate ? [fate[1]] : [] },
      version: {
        id: ref, run: doc.run, step: doc.columns.step[at], created_at: new Date(doc.columns.at_ms[at]).toISOString(), head: doc.head === ref, tags: doc.tags[at] ?? [], level: doc.columns.level[at],
        metrics: Object.fromEntries(values.map(([name, column]) => [name, column[at]])), best: Object.keys(doc.best).filter(name => doc.best[name] === ref),
        ...Object.fromEntries(Object.entries(FLAGS).map(([name, flag]) => [name, Boolean(doc.columns.flags[at] & flag)]))
      }
    }
  }
  throw error
}

function tensors (doc, ref) {
  const place = h('div')
  const roles = [...new Set(doc.tensors.map(one => one.role))]
  const search = h('input', { type: 'search', oninput: () => { clearTimeout(search.later); search.later = setTimeout(draw, 200) } })
  const role = h('select', { onchange: () => draw() }, h('option', { value: '' }, 'all'), roles.map(one => h('option', {}, one)))
  const histogram = one => {
    const button = h('button', {
      'aria-label': `Histogram of ${one.path}`,
      onclick: async () => {
        button.disabled = true
        button.replaceWith(await get('values', { ref: `#${ref}`, path: one.path }).then(bins, error => note(error.message, true)))
      }
    }, 'Values')
    return button
  }
  async function draw () {
    let found = doc
    if (search.value && doc.tensors_count > doc.tensors.length && !documents) found = await get('version', { ref, search: search.value })
    const rows = found.tensors.filter(one => one.path.toLowerCase().includes(search.value.toLowerCase()) && (!role.value || one.role === role.value))
    const coded = rows.some(one => one.encoding !== 'lossless')
    place.replaceChildren(table(`${nouns(rows.length, 'tensor')} of ${count(doc.tensors_count)}`, [
      ['Tensor', one => [one.path, one.aliases.length ? h('div', { class: 'soft' }, `= ${one.aliases.join(', ')}`) : ''], 'row name mono'], ['Role', one => one.role],
      ['Dtype', one => one.dtype], ['Shape', one => one.shape.join(' × ') || 'scalar'], ['Bytes', one => bytes(one.nbytes), 'number'],
      ['Stored as', one => one.derived_from ? `from ${one.derived_from}` : one.encoding, 'wide'],
      ...(coded ? [['Max. error', one => one.encoding === 'lossless' ? '0' : `${metric(Number(one.max_abs.toPrecision(3)))}${one.max_abs_bound == null ? '' : ` of ${metric(one.max_abs_bound)}`}`, 'number'],
        ['Rel. L2', one => one.encoding === 'lossless' ? '0' : `${metric(Number(one.rel_l2.toPrecision(3)))}${one.rel_l2_bound == null ? '' : ` of ${metric(one.rel_l2_bound)}`}`, 'number']] : []),
      ...(documents ? [] : [['Values', histogram]])
    ], rows, { most: 50 }))
  }
  draw()
  return [h('div', { class: 'tools' }, h('label', {}, 'Search ', search), h('label', {}, 'Role ', role)), place,
    doc.tensors_count > doc.tensors.length && h('p', { class: 'soft' }, `The first ${count(doc.tensors.length)}; a search finds the others.`)]
}

function bins (doc) {
  const most = Math.max(...doc.counts, 1), wide = 180 / (doc.counts.length || 1)
  const text = doc.counts.length ? `${metric(doc.low)} to ${metric(doc.high)}, mean ${metric(doc.mean)}, deviation ${metric(doc.deviation)}, ${count(doc.zeros)} zeros` : 'no finite number'
  const more = `${doc.nonfinite ? `, ${count(doc.nonfinite)} not finite` : ''}${doc.counted < doc.elements ? `; the first ${count(doc.counted)} of ${count(doc.elements)}` : ''}`
  return h('div', { class: 'histogram' }, s('svg', { width: 180, height: 48, viewBox: '0 0 180 48', role: 'img', 'aria-label': `Histogram: ${text}${more}` },
    doc.counts.map((value, at) => s('rect', { class: 'f0', x: at * wide, width: Math.max(1, wide - 0.5), y: 48 - 46 * value / most, height: 46 * value / most }))), h('div', { class: 'soft' }, text + more))
}

async function diff (params) {
  const first = h('input', { name: 'first', value: params.get('first') ?? '', size: 34, spellcheck: 'false' })
  const second = h('input', { name: 'second', value: params.get('second') ?? '', size: 34, spellcheck: 'false' })
  const parts = [h('h1', {}, 'Compare'), h('form', { class: 'tools', onsubmit: event => { event.preventDefault(); location.hash = to('diff', { first: first.value.trim(), second: second.value.trim() }) } },
    h('label', {}, 'First ', first), h('label', {}, 'Second ', second), h('button', {}, 'Compare'))]
  if (!first.value || !second.value) {
    const held = documents && Object.values(documents).filter(doc => doc.counts && doc.first)
    if (held?.length) parts.push(h('h2', {}, 'In this report'), h('ul', {}, held.map(doc => h('li', {}, link(`${doc.first.run}@${doc.first.step} → ${doc.second.run}@${doc.second.step}`, 'diff', { first: doc.first.id, second: doc.second.id })))))
    else parts.push(note('Two versions: ids, or refs such as gpt@1000 and gpt@best:val_loss.'))
    return parts
  }
  const doc = await get('diff', { first: first.value, second: second.value })
  const side = one => one ? `${one.dtype} ${one.shape.join(' × ') || 'scalar'}` : '–'
  parts.push(h('h2', {}, versionLink(doc.first), ' → ', versionLink(doc.second)), h('p', {}, doc.equal ? 'Nothing differs.' : Object.entries(doc.counts).filter(([, value]) => value).map(([name, value]) => `${count(value)} ${name}`).join(', ')),
    table('Tensors that differ', [['Tensor', one => one.path, 'row name mono'], ['Status', one => one.status], ['Was', one => one.status === 'moved' ? one.before.path : side(one.before)], ['Is', one => side(one.after)],
      ['Bytes', one => bytes((one.after ?? one.before).nbytes), 'number'], ['Same pieces', one => one.status === 'changed' && one.after.nbytes ? `${Math.round(100 * one.same_bytes / one.after.nbytes)}%` : '–', 'number']], doc.tensors))
  if (doc.values.length) parts.push(h('h2', {}, 'Values'), table(`${nouns(doc.values_count, 'value')} that differ`, [['Value', one => one.path, 'row name mono'], ['Was', one => one.before || '–', 'name'], ['Is', one => one.after || '–', 'name']], doc.values))
  return parts
}

async function storage () {
  const doc = await get('storage')
  const group = (title, rows, linked) => [h('h2', {}, title), table(`Bytes ${title.toLowerCase()}`, [[title.replace(/By (.)/, (_, one) => one.toUpperCase()), row => linked ? link(row.name, 'run', { run: row.name }) : row.name, 'row name'], ['Versions', row => row.versions == null ? '–' : count(row.versions), 'number'],
    ['If loaded', row => bytes(row.logical_bytes), 'number wide'], ['New', row => bytes(row.new_bytes), 'number wide'], ['Stored', row => bytes(row.stored_bytes), 'number'], ['', row => bar(row.stored_bytes, doc.stored_bytes), 'bars'],
    ...(rows.some(row => row.roles) ? [['By role', row => Object.entries(row.roles).map(([name, part]) => `${name} ${bytes(part.stored_bytes)}`).join(', '), 'wide']] : [])], rows, { quiet: true, most: 50 })]
  return [h('h1', {}, `${bytes(doc.stored_bytes)} stored for ${nouns(doc.versions, 'version')}`), h('p', { class: 'soft' }, 'As counted by the saves; ', h('code', {}, 'ckptstore du --shared'), ' shows what versions share, ', h('code', {}, 'ckptstore stats'), ' the objects.'),
    group('By run', doc.runs, true), group('By role', Object.entries(doc.roles).map(([name, part]) => ({ name, ...part }))), group('By age', doc.ages.map(one => ({ ...one, name: one.name === 'more' ? 'over a year' : `up to ${one.name}` }))),
    h('h2', {}, 'By level'), table('Versions by what is kept', [['Kept', row => row[0], 'row'], ['Versions', row => count(row[1]), 'number']], Object.entries(doc.levels), { quiet: true })]
}

async function health () {
  const doc = await get('health')
  const did = one => one ? `${age(one.at_ms)} ago, commit ${count(one.number)}` : `not in the last ${nouns(doc.commits_read, 'commit')}`
  return [h('h1', {}, 'Health'), doc.damaged_count > 0 && note(`${nouns(doc.damaged_count, 'version')} lost parts: ckptstore repair`, true),
    facts([['Verified', `${count(doc.verified)} of ${nouns(doc.versions, 'version')}, every byte`], ['Last verify', did(doc.last_verify)], ['Last gc', did(doc.last_gc)],
      ['To be collected', `${nouns(doc.condemned, 'object')} condemned, ${nouns(doc.deleted, 'version')} deleted`],
      ['Damaged', doc.damaged.map((one, at) => [at ? ', ' : '', versionLink(one)])]]),
    h('h2', {}, 'Replicas'), doc.replicas.length
      ? table('Replicas', [['Name', one => one.name, 'row'], ['Place', one => one.url, 'name'], ['Versions', one => count(one.versions), 'number'], ['Missing', one => count(one.missing), 'number'], ['Missing bytes', one => bytes(one.missing_bytes), 'number'], ['Behind since', one => one.oldest_ms ? `${age(one.oldest_ms)}` : 'up to date', 'number']], doc.replicas, { quiet: true })
      : note('No replica has a name; ckptstore replica add NAME URL'),
    h('h2', {}, 'Last commits'), table('Last commits', [['Commit', one => count(one.number), 'row number'], ['Time (UTC)', one => time(one.at_ms)], ['What', one => one.what, 'name'], ['By', one => one.by, 'name wide']], doc.commits, { quiet: true })]
}

// --- the way through --------------------------------------------------------------------------

const VIEWS = { runs, run, lineage, version, diff, storage, health }
let turn = 0

async function show () {
  if (location.hash === '#main') { main.focus(); return }
  const [name, search] = location.hash.slice(1).split('?')
  const view = Object.hasOwn(VIEWS, name) ? name : 'runs'
  const own = ++turn
  main.setAttribute('aria-busy', 'true')
  let parts
  try {
    made = documents ? documents.overview.at_ms : Date.now()
    parts = await VIEWS[view](new URLSearchParams(search ?? ''))
  } catch (error) {
    parts = [h('h1', {}, 'Not shown'), note(error.message, true)]
  }
  if (own !== turn) return
  main.replaceChildren(...[parts].flat(9).filter(Boolean))
  main.removeAttribute('aria-busy')
  for (const one of document.querySelectorAll('nav a')) {
    const here = one.hash === `#${view}` || (view === 'run' && one.hash === '#runs') || (view === 'version' && one.hash === '#runs')
    if (here) one.setAttribute('aria-current', 'page')
    else one.removeAttribute('aria-current')
  }
  const title = main.querySelector('h1')
  document.title = `${title?.textContent ?? ''} – ckptstore`
  if (own > 1) { main.focus(); window.scrollTo(0, 0) }
  if (own === 1 && view !== 'runs') get('overview').then(head, () => {})
}

const find = document.getElementById('find')
find.hidden = Boolean(documents)
find.addEventListener('submit', event => { event.preventDefault(); location.hash = to('version', { ref: find.elements.ref.value.trim() }) })
window.addEventListener('hashchange', show)
show()
