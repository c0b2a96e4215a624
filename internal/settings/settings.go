// SPDX-License-Identifier: Apache-2.0

// Package settings makes flags, defaults and checks from the tags of a struct's fields, so that a
// setting is described in one place. A field with the tag `yaml:"NAME"` is the setting NAME; a
// configuration file has it under the same name. Embedded structs count as a part of the struct.
// Other tags:
//
//   - default: the value without file and flag, as a flag's text
//   - want: the values that are accepted: "a, b or nothing", "1 to 5", "0 or more", "more than 0",
//     or "more than 0, at most 5". Without it every value is
//   - help: the text of -h, in which <…> is the kind of value. A setting without help is no flag
//
// A struct with long help texts has them in the comments of its fields instead, and a method Help
// that is generated from these. The first paragraph of a comment is the help text, without a full
// stop at its end; later paragraphs are for readers of the code. A field whose comment begins with
// the field's name is no flag.
//
// A field has the type string, bool, int, int64, uint64, float64 or [time.Duration]. It may be a
// pointer to a float64 or int, which is nil without a value, or a []string, whose flag may be given
// several times.
package settings

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"iter"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// SetDefaults sets the settings of a struct that have zero values to their defaults. It panics if
// a tag is wrong.
func SetDefaults(to any) {
	fs := flag.NewFlagSet("defaults", flag.ContinueOnError)
	AddFlags(fs, to)
	for name, s := range All(to) {
		if text, ok := s.Tag.Lookup("default"); ok && s.Value.IsZero() {
			if err := fs.Set(name, text); err != nil {
				panic(err)
			}
		}
	}
}

var kindOfValue = regexp.MustCompile(`<([^>]*)>`)

// AddFlags makes every setting of a struct a flag, with the setting's value as the default.
func AddFlags(fs *flag.FlagSet, to any) {
	for name, s := range All(to) {
		if s.Help == "" {
			continue
		}
		help := kindOfValue.ReplaceAllString(s.Help, "`$1`")
		switch p := s.Value.Addr().Interface().(type) {
		case *string:
			fs.StringVar(p, name, *p, help)
		case *bool:
			fs.BoolVar(p, name, *p, help)
		case *int:
			fs.IntVar(p, name, *p, help)
		case *int64:
			fs.Int64Var(p, name, *p, help)
		case *uint64:
			fs.Uint64Var(p, name, *p, help)
		case *float64:
			fs.Float64Var(p, name, *p, help)
		case *time.Duration:
			fs.DurationVar(p, name, *p, help)
		case *[]string:
			fs.Func(name, help, func(text string) error {
				*p = append(*p, text)
				return nil
			})
		case **float64:
			fs.Func(name, help, func(text string) error {
				v, err := strconv.ParseFloat(text, 64)
				*p = &v
				return err
			})
		case **int:
			fs.Func(name, help, func(text string) error {
				v, err := strconv.Atoi(text)
				*p = &v
				return err
			})
		}
	}
}

// Check returns an error that names each setting whose value its tag does not accept.
func Check(of any) error {
	var errs []error
	for name, s := range All(of) {
		want, value := s.Tag.Get("want"), s.Value
		if value.Kind() == reflect.Pointer && !value.IsNil() {
			value = value.Elem()
		}
		if text := fmt.Sprint(value.Interface()); want != "" && value.Kind() != reflect.Pointer && !accepts(want, text) {
			errs = append(errs, fmt.Errorf("%s is %q, want %s", name, text, want))
		}
	}
	return errors.Join(errs...)
}

// Changed returns the names of the settings that have different values in two structs of one type,
// in order.
func Changed(a, b any) (names []string) {
	other := maps.Collect(All(b))
	for name, s := range All(a) {
		if !reflect.DeepEqual(s.Value.Interface(), other[name].Value.Interface()) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Setting is one setting of a struct.
type Setting struct {
	Tag   reflect.StructTag
	Help  string // empty if the setting is no flag
	Value reflect.Value
}

// helper is a struct with a method that returns the help text of a setting, "" if it has none.
type helper interface{ Help(setting string) string }

// All ranges over the settings of the struct that a pointer points to.
func All(of any) iter.Seq2[string, Setting] {
	return func(yield func(name string, s Setting) bool) {
		v := reflect.ValueOf(of).Elem()
		for _, f := range reflect.VisibleFields(v.Type()) {
			name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
			if name == "" {
				continue // embedded
			}
			help := f.Tag.Get("help")
			declaring := v.FieldByIndex(f.Index[:len(f.Index)-1]).Type()
			if h, ok := reflect.TypeAssert[helper](reflect.New(declaring)); ok && help == "" {
				help = h.Help(name)
			}
			if !yield(name, Setting{f.Tag, help, v.FieldByIndex(f.Index)}) {
				return
			}
		}
	}
}

// alternatives separates the words of a tag like "a, b or c".
var alternatives = regexp.MustCompile(`, | or `)

// accepts reports whether a tag accepts a value.
func accepts(want, value string) bool {
	v := number(value)
	above, isAbove := strings.CutPrefix(want, "more than ")
	above, most, bounded := strings.Cut(above, ", at most ")
	low, isLow := strings.CutSuffix(want, " or more")
	from, to, isRange := strings.Cut(want, " to ")
	switch {
	case isAbove:
		return v > number(above) && (!bounded || v <= number(most))
	case isLow:
		return v >= number(low)
	case isRange:
		return v >= number(from) && v <= number(to)
	}
	return slices.Contains(alternatives.Split(want, -1), cmp.Or(value, "nothing"))
}

// number reads a number or a duration; NaN if the text is neither.
func number(text string) float64 {
	if d, err := time.ParseDuration(text); err == nil {
		return float64(d)
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return math.NaN()
	}
	return n
}
