// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/settings"
)

// strange sets all fields of a value, also in structs and lists, to values that are no defaults.
func strange(v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(v.Int() + 1e9)
	case reflect.Uint32, reflect.Uint64:
		v.SetUint(v.Uint() + 3)
	case reflect.Float64:
		v.SetFloat(v.Float() + 0.125)
	case reflect.String:
		v.SetString("a: text")
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		strange(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		strange(v.Index(0))
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		strange(key)
		strange(value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for f, field := range v.Fields() {
			if f.IsExported() && f.Tag.Get("json") != "-" {
				strange(field)
			}
		}
	default:
	}
}

// Later versions read a configuration file with all settings of version 0.1.0, with the same values. A key that the version does not know
// is an error, unlike in messages.
func TestGoldenConfiguration(t *testing.T) {
	c := defaults()
	for name, s := range settings.All(&c) {
		if name != "version" {
			strange(s.Value)
		}
	}
	written, err := yaml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	if os.Getenv("KVROUTE_WRITE") == "" {
		written = nil // kvroute writes no such files, and may have more settings
	}
	fixtures.Golden(t, "0.1.0/kvroute.yaml", written, func(data []byte) (changed []string, err error) {
		c, err := readFile(writeFile(t, string(data)))
		if err != nil {
			return nil, err
		}
		text, err := yaml.Marshal(c)
		after := strings.Split(string(text), "\n")
		for line := range strings.Lines(string(data)) { // a later version may have more settings
			if at := slices.Index(after, strings.TrimSuffix(line, "\n")); at < 0 {
				changed = append(changed, line)
			} else {
				after = slices.Delete(after, at, at+1)
			}
		}
		return changed, err
	}, nil)
	if _, err := readFile(writeFile(t, "version: 1\nlater: 1\n")); err == nil || !strings.Contains(err.Error(), "later") {
		t.Errorf("with an unknown key: %v", err)
	}
}
