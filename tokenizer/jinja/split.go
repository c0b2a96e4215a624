// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"strings"
	"unicode/utf8"
)

// split is str.split and str.rsplit.
func (r *renderer) split(v Value, a *args, fromRight bool) (Value, error) {
	sep, err := a.word("split", 0, "sep", "")
	if err != nil {
		return Value{}, err
	}
	limit, err := a.count(1, "maxsplit", -1)
	if err != nil {
		return Value{}, err
	}
	if err := r.tick(1 + len(v.str)/stringStep); err != nil {
		return Value{}, err
	}
	var parts []string
	given, ok := a.get(0, "sep")
	switch {
	case !ok || given.IsNone():
		parts = r.fields(v.str, limit, fromRight)
	case sep == "":
		return Value{}, errorf(ValueError, "empty separator")
	case limit < 0:
		if err := r.listed(strings.Count(v.str, sep)); err != nil {
			return Value{}, err
		}
		parts = strings.Split(v.str, sep)
	case fromRight:
		s := v.str
		for ; limit > 0 && r.more(); limit-- {
			i := strings.LastIndex(s, sep)
			if i < 0 {
				break
			}
			parts = append(parts, s[i+len(sep):])
			s = s[:i]
		}
		parts = append(parts, s)
		for i, j := 0, len(parts)-1; i < j; i, j = i+1, j-1 {
			parts[i], parts[j] = parts[j], parts[i]
		}
	default:
		if err := r.listed(min(limit, strings.Count(v.str, sep))); err != nil {
			return Value{}, err
		}
		parts = strings.SplitN(v.str, sep, limit+1)
	}
	return r.stringList(parts, v.kind)
}

// stringList returns parts as a list of strings of a kind.
func (r *renderer) stringList(parts []string, k kind) (Value, error) {
	if err := r.listed(len(parts)); err != nil {
		return Value{}, err
	}
	items := make([]Value, len(parts))
	for i, p := range parts {
		items[i] = Value{kind: k, str: p}
	}
	return List(items...), nil
}

// more counts one more of the strings that a string is parted into.
func (r *renderer) more() bool {
	r.hold(valueSize)
	return r.spend(itemSteps)
}

// fields parts at runs of white space, at most limit times if that is not negative.
func (r *renderer) fields(s string, limit int, fromRight bool) (parts []string) {
	if fromRight && limit >= 0 {
		s = strings.TrimRightFunc(s, isSpace)
		for s != "" && r.more() {
			if len(parts) == limit {
				parts = append(parts, s)
				break
			}
			i := strings.LastIndexFunc(s, isSpace)
			if i < 0 {
				parts = append(parts, s)
				break
			}
			_, n := utf8.DecodeRuneInString(s[i:])
			parts = append(parts, s[i+n:])
			s = strings.TrimRightFunc(s[:i], isSpace)
		}
		for i, j := 0, len(parts)-1; i < j; i, j = i+1, j-1 {
			parts[i], parts[j] = parts[j], parts[i]
		}
		return parts
	}
	s = strings.TrimLeftFunc(s, isSpace)
	for s != "" && r.more() {
		if limit >= 0 && len(parts) == limit {
			return append(parts, s)
		}
		i := strings.IndexFunc(s, isSpace)
		if i < 0 {
			return append(parts, s)
		}
		parts = append(parts, s[:i])
		s = strings.TrimLeftFunc(s[i:], isSpace)
	}
	return parts
}

func splitLines(r *renderer, v Value, a *args) (Value, error) {
	keep, _ := a.get(0, "keepends")
	parts, err := r.lines(v.str, keep.truth())
	if err != nil {
		return Value{}, err
	}
	return r.stringList(parts, v.kind)
}

// lines parts s as str.splitlines does.
func (r *renderer) lines(s string, keep bool) (parts []string, err error) {
	if err := r.tick(1 + len(s)/4); err != nil {
		return nil, err
	}
	for s != "" && r.more() {
		i := strings.IndexAny(s, "\n\r\v\f\x1c\x1d\x1e\u0085\u2028\u2029")
		if i < 0 {
			parts = append(parts, s)
			break
		}
		_, n := utf8.DecodeRuneInString(s[i:])
		if strings.HasPrefix(s[i:], "\r\n") {
			n = 2
		}
		if keep {
			parts = append(parts, s[:i+n])
		} else {
			parts = append(parts, s[:i])
		}
		s = s[i+n:]
	}
	return parts, r.broken
}

// replace is str.replace. A safe string escapes what it puts in.
func (r *renderer) replace(v Value, a *args) (Value, error) {
	var s [2]string
	for i, name := range []string{"old", "new"} {
		x, ok := a.get(i, name)
		switch {
		case !ok:
			return Value{}, errorf(TypeError, "replace expected at least 2 arguments")
		case !x.isString():
			return Value{}, errorf(TypeError, "replace() argument %d must be str, not %s", i+1, x.typeName())
		}
		s[i] = x.str
	}
	n, err := a.count(2, "count", -1)
	if err != nil {
		return Value{}, err
	}
	if x, _ := a.get(1, "new"); v.kind == kindSafe && x.kind == kindString {
		s[1] = r.escaped(s[1])
	}
	times := strings.Count(v.str, s[0])
	if n >= 0 {
		times = min(times, n)
	}
	if err := r.made(len(v.str) + times*len(s[1])); err != nil {
		return Value{}, err
	}
	return Value{kind: v.kind, str: strings.Replace(v.str, s[0], s[1], n)}, nil
}
