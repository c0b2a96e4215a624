// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"slices"
	"strconv"
)

// Narrow returns a value that was read from JSON with each integer that 64 bits cannot hold replaced by a
// floating point number. orjson reads such integers in this way.
func (v Value) Narrow() Value {
	switch {
	case v.kind == kindBig:
		if _, err := strconv.ParseUint(v.str, 10, 64); err == nil {
			return v
		}
		f, _ := strconv.ParseFloat(v.str, 64)
		return Float(f)
	case v.IsList():
		items := slices.Clone(v.Items())
		for i := range items {
			items[i] = items[i].Narrow()
		}
		return List(items...)
	case v.Dict() != nil:
		d := v.Dict().Clone()
		for i := range d.values {
			d.values[i] = d.values[i].Narrow()
		}
		return FromDict(d)
	}
	return v
}
