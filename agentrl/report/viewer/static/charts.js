// Pictures: curves (uPlot), sparklines, reliability and stacked bars (SVG). Shared by the page and the report.
'use strict'
const { html, render, useState, useEffect, useRef, useMemo } = htmPreact

const COLORS = ['--c1', '--c2', '--c3', '--c4', '--c5', '--c6', '--c7', '--c8']
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()
const number = (value, digits = 3) =>
  value === null || value === undefined ? '–'
    : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(1)
      : Number.isInteger(value) ? value.toLocaleString('en') : String(+value.toFixed(digits))
const seconds = s => s === null || s === undefined ? '–' : s < 1 ? `${Math.round(s * 1000)} ms` : s < 90 ? `${number(s, 1)} s`
  : s < 5400 ? `${Math.round(s / 60)} min` : `${number(s / 3600, 1)} h`

const theme = { value: 0, listeners: new Set(), changed() { this.value++; this.listeners.forEach(f => f(this.value)) } }
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => theme.changed())
const useTheme = () => {
  const [value, set] = useState(theme.value)
  useEffect(() => { theme.listeners.add(set); return () => theme.listeners.delete(set) }, [])
  return value
}

// Marks (alarms, evaluations) are vertical lines; bands are intervals around a series.
function plugin(marks) {
  return { hooks: { draw: [u => {
    const { ctx, bbox } = u
    ctx.save()
    for (const mark of marks) {
      const x = Math.round(u.valToPos(mark.x, 'x', true))
      if (x < bbox.left || x > bbox.left + bbox.width) continue
      ctx.strokeStyle = css(mark.color || '--bad'); ctx.lineWidth = devicePixelRatio; ctx.setLineDash([4, 3])
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke()
    }
    ctx.restore()
  }] } }
}

function Chart({ title, hint, x, series, marks = [], height = 150, range, bands, points, wide }) {
  const box = useRef(null), plot = useRef(null), colours = useTheme()
  const [at, setAt] = useState(null)
  const shape = series.map(s => s.label + (s.color || '') + (s.dash ? 'd' : '') + (s.hidden ? 'h' : '')).join('|')
  useEffect(() => {
    const axis = { stroke: css('--faint'), grid: { stroke: css('--line'), width: 1 }, ticks: { show: false }, font: '11px system-ui' }
    const options = {
      width: Math.max(120, box.current.clientWidth), height, legend: { show: false }, padding: [8, 8, 0, 0],
      cursor: { points: { size: 6 }, drag: { x: true, y: false }, sync: { key: 'step' } },
      scales: { x: { time: false }, y: range ? { range } : { range: (u, lo, hi) => pad(lo, hi) } },
      axes: [{ ...axis, size: 26, space: 60 }, { ...axis, size: 46, space: 28, values: (u, all) => all.map(v => number(v, 4)) }],
      series: [{}, ...series.map((s, n) => {
        const color = css(s.color || COLORS[n % COLORS.length])
        return { label: s.label, stroke: s.hidden ? 'transparent' : color, width: s.hidden ? 0 : 1.75, dash: s.dash ? [5, 4] : undefined,
          spanGaps: true, points: { show: points && !s.hidden, size: 5, fill: color } }
      })],
      bands: (bands || []).map(([high, low, n]) => ({ series: [high, low], fill: css(COLORS[n % COLORS.length]) + '2e' })),
      hooks: { setCursor: [u => setAt(u.cursor.idx === undefined ? null : u.cursor.idx)] },
      plugins: [plugin(marks)],
    }
    plot.current = new uPlot(options, [x, ...series.map(s => s.values)], box.current)
    const watch = new ResizeObserver(() => {
      const width = box.current && Math.max(120, box.current.clientWidth)
      if (width && plot.current && width !== plot.current.width) plot.current.setSize({ width, height })
    })
    watch.observe(box.current)
    return () => { watch.disconnect(); plot.current.destroy(); plot.current = null }
  }, [shape, colours, height, JSON.stringify(marks.map(m => m.x))])
  useEffect(() => { if (plot.current) plot.current.setData([x, ...series.map(s => s.values)]) }, [x, series])
  const shown = at === null || at === undefined ? x.length - 1 : at
  const visible = series.filter(s => !s.hidden)
  return html`<figure class=${wide ? 'chart wide' : 'chart'}>
    <figcaption title=${hint || ''}><b>${title}</b>
      <span class="legend">${visible.map((s, n) => html`<span key=${s.label}><i style=${{ background: `var(${s.color || COLORS[series.indexOf(s) % COLORS.length]})` }}></i>${visible.length > 1 ? s.label + ' ' : ''}<b>${number(last(s.values, shown, at))}</b></span>`)}
      ${at !== null && at !== undefined && x[at] !== undefined ? html`<small>step ${x[at]}</small>` : ''}</span>
    </figcaption><div ref=${box}></div></figure>`
}
const pad = (lo, hi) => {
  if (lo === null || hi === null || lo === undefined) return [0, 1]
  const gap = (hi - lo) || Math.abs(hi) || 1
  return [lo >= 0 && lo - 0.08 * gap < 0 ? 0 : lo - 0.08 * gap, hi + 0.08 * gap]
}
function last(values, at, exact) {
  if (exact !== null && exact !== undefined) return values[at]
  for (let n = at; n >= 0; n--) if (values[n] !== null && values[n] !== undefined) return values[n]
  return null
}

function Spark({ values, width = 120, height = 24 }) {
  const numbers = values.map(v => v === null ? 0 : v)
  if (numbers.length < 2) return html`<svg class="spark" width=${width} height=${height} aria-hidden="true"></svg>`
  const high = Math.max(1e-9, ...numbers), low = Math.min(0, ...numbers)
  const points = numbers.map((v, n) => `${(n / (numbers.length - 1) * (width - 2) + 1).toFixed(1)},${(height - 2 - (v - low) / (high - low) * (height - 4)).toFixed(1)}`)
  return html`<svg class="spark" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="img" aria-label="score by step">
    <polyline points=${points.join(' ')} /></svg>`
}

// Believed against realised pass rates: on the diagonal the curriculum is right.
function Reliability({ rows }) {
  const size = 240, edge = 30, at = v => edge + v * (size - edge - 8), up = v => size - edge - v * (size - edge - 8)
  const most = Math.max(1, ...rows.map(r => r[2]))
  return html`<svg class="reliability" viewBox=${`0 0 ${size} ${size}`} role="img" aria-label="believed against realised pass rate">
    ${[0, 0.25, 0.5, 0.75, 1].map(v => html`<g key=${v}><line class="grid" x1=${at(0)} x2=${at(1)} y1=${up(v)} y2=${up(v)} /><line class="grid" y1=${up(0)} y2=${up(1)} x1=${at(v)} x2=${at(v)} />
      <text x=${edge - 5} y=${up(v) + 4} text-anchor="end">${v}</text><text x=${at(v)} y=${size - edge + 14} text-anchor="middle">${v}</text></g>`)}
    <line class="diagonal" x1=${at(0)} y1=${up(0)} x2=${at(1)} y2=${up(1)} />
    ${rows.map(r => html`<circle key=${r[0] + r[1]} cx=${at(r[3])} cy=${up(r[4])} r=${3 + 7 * Math.sqrt(r[2] / most)}><title>${`${r[0]}: believed ${number(r[3])}, realised ${number(r[4])}, ${r[2]} rollouts`}</title></circle>`)}
    <text x=${at(0.5)} y=${size - 2} text-anchor="middle">believed p</text>
    <text transform=${`translate(9 ${up(0.5)}) rotate(-90)`} text-anchor="middle">realised p</text></svg>`
}

function Bars({ parts }) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1
  const shown = parts.filter(([, value]) => value > 0)
  return html`<div class="bars"><div class="bar" role="img" aria-label="time by stage">${shown.map(([name, value], n) => html`<i key=${name} title=${`${name}: ${seconds(value)}`} style=${{ width: `${100 * value / total}%`, background: `var(${COLORS[n % COLORS.length]})` }}></i>`)}</div>
    <ul class="legend">${shown.map(([name, value], n) => html`<li key=${name}><i style=${{ background: `var(${COLORS[n % COLORS.length]})` }}></i>${name} <b>${seconds(value)}</b> <small>${Math.round(100 * value / total)} %</small></li>`)}</ul></div>`
}

// Where rollouts went: levels by steps; the cell's darkness is the number of rollouts, its colour their score.
function LevelMap({ data }) {
  const names = [...new Set(data.levels.map(r => `${r[0]}\u0000${r[1]}`))]
  const most = Math.max(1, ...data.levels.map(r => r[3]))
  const cell = new Map(data.levels.map(r => [`${r[0]}\u0000${r[1]}\u0000${r[2]}`, r]))
  return html`<div class="scroll"><table class="levels"><thead><tr><th>level</th>${data.bins.map((b, n) => html`<th key=${b} class="num">${n % 4 ? '' : b}</th>`)}</tr></thead><tbody>
    ${names.map(name => { const [env, level] = name.split('\u0000'); return html`<tr key=${name}><th>${env} ${level}</th>${data.bins.map((b, n) => {
      const r = cell.get(`${name}\u0000${n}`)
      return html`<td key=${b}>${r ? html`<i title=${`${env} level ${level}, steps ${b} to ${b + data.width - 1}: ${r[3]} rollouts, mean score ${number(r[4])}`} style=${{ opacity: 0.25 + 0.75 * r[3] / most, background: `hsl(${Math.round(10 + 130 * (r[4] || 0))} 60% 45%)` }}></i>` : ''}</td>` })}</tr>` })}
  </tbody></table></div>`
}
