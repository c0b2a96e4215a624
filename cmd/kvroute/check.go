// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/token"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/doctor"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/settings"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/tokenizer"
)

// checkConfig checks a configuration and what it names: it reads certificates, tokens, chat
// templates and tokenizers, and makes and locks the state folder, as serve does. It opens no listener
// and does not connect to NATS or to workers.
func checkConfig(_ context.Context, args []string, std stdio) error {
	c, file, err := readConfig("config check", args, nil)
	if err != nil {
		return err
	}
	log := telemetry.NewLogger(std.err, telemetry.Level(c.LogLevel), c.LogFormat, nil)
	s := server{conf: c, log: log}
	defer func() { _ = s.close() }()
	_, noTLS := c.extprocTLS(log)
	_, noHTTPS := c.httpTLS(log)
	_, noNATS := (&tlsFiles{of: "nats", cert: c.NATSCert, key: c.NATSKey, log: log}).open()
	_, noURL := bus.ReadURL(c.NATSURL)
	_, noModels := c.loadCards(tokenizer.NewCache(c.TokenizerCacheBytes), log)
	errs := []error{
		s.lockStateDir(), noTLS, noHTTPS, noNATS, noURL, s.networks.Secure(c.WorkerTLSCA, c.WorkerTLSName), noModels,
	}
	if c.APITokenFile != "" {
		_, err = api.ReadTokens(c.APITokenFile)
		errs = append(errs, err)
	}
	if c.NATSCA != "" {
		_, err = reach.Authorities("nats-ca", c.NATSCA)
		errs = append(errs, err)
	}
	for name, path := range map[string]string{
		"trace-out": c.TraceOut, "endpoint-file": c.EndpointFile,
		"extproc-address": strings.TrimPrefix(c.ExtprocAddress, "unix:"),
	} {
		info, err := os.Stat(filepath.Dir(path))
		if at, there := os.Stat(path); path != "" && (err != nil || !info.IsDir() || there == nil && at.IsDir()) {
			errs = append(errs, fmt.Errorf("%s is %q, want a file in a folder that exists", name, path))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return located(err, file, nil)
	}
	_, err = fmt.Fprintf(std.out, "the configuration is right: it lists %s, %s and %s\n",
		doctor.Counted(len(c.Workers), "worker"), doctor.Counted(len(c.Groups), "router group"),
		doctor.Counted(len(c.Models), "model"))
	return err
}

// checkWorkers refuses wrong workers. Names are not looked up: this machine's DNS may differ from
// the router's.
func (c *config) checkWorkers() error {
	networks, err := reach.Parse(c.WorkerNetworks)
	if err != nil {
		return fmt.Errorf("worker-networks: %w", err)
	}
	names := fleet.Names{Lookup: func(context.Context, string) ([]netip.Addr, error) {
		if a := networks.First(); a.IsValid() {
			return []netip.Addr{a}, nil
		}
		return []netip.Addr{netip.IPv6Loopback()}, nil
	}}
	errs := []error{fleet.CheckIdentities(c.Workers, true)}
	local := fleet.Names{Lookup: func(_ context.Context, host string) ([]netip.Addr, error) {
		if host != "localhost" {
			return nil, errors.New("not looked up")
		}
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}, nil
	}}
	if errs[0] == nil {
		known, _ := local.Resolve(context.Background(), c.Workers)
		errs[0] = fleet.CheckIdentities(known, false)
	}
	for i := range c.Workers {
		workers, _ := names.Resolve(context.Background(), c.Workers[i:i+1])
		if _, err := workers[0].Info(networks); err != nil {
			text := err.Error() // fleet: worker "a" (5): block_size is ...
			field, _, _ := strings.Cut(text, " is ")
			errs = append(errs, fmt.Errorf("workers[%d].%s", i, text[strings.LastIndex(field, " ")+1:]))
		}
	}
	return errors.Join(errs...)
}

// settingName is the name of a setting with which an error begins, or of a part of one.
var settingName = regexp.MustCompile(`^[a-z][a-z0-9-]*(\[\d+\])?(\.[a-z0-9_-]+)*`)

// located adds the line of the configuration file to each error that begins with the name of a setting
// which the file has, and which no flag has changed.
func located(err error, file string, given map[string]bool) error {
	if info, none := os.Stat(file); err == nil || none != nil || !info.Mode().IsRegular() { // a pipe can be read once
		return err
	}
	data, _ := readYAML(file)
	tree, bad := parseYAML(file, data)
	if bad != nil {
		return err
	}
	var all []error
	lines := map[error]int{}
	for text := range strings.Lines(err.Error()) {
		name := settingName.FindString(text)
		at, n := "", 0
		for part := name; part != "" && at == "" && !given[name]; part = part[:max(0, strings.LastIndexAny(part, ".["))] {
			path, err := yaml.PathString("$." + part)
			if err != nil {
				continue
			}
			if node, err := path.FilterFile(tree); err == nil {
				n = node.GetToken().Position.Line
				at = fmt.Sprintf("%s:%d: ", file, n)
			}
		}
		one := errors.New(at + strings.TrimSuffix(text, "\n"))
		all, lines[one] = append(all, one), n
	}
	slices.SortStableFunc(all, func(a, b error) int { return lines[a] - lines[b] })
	return errors.Join(all...)
}

var wrongTime = regexp.MustCompile(`^time: .*"(.*)"$`)

// misread says where the configuration file is wrong, and what is wanted there.
func misread(err error, file string, data []byte) error {
	lines := strings.Split(string(data), "\n")
	if text := wrongTime.FindStringSubmatch(err.Error()); text != nil { // the only error without a place
		for i, line := range lines {
			if key, value, _ := strings.Cut(line, ":"); strings.HasPrefix(strings.TrimLeft(value, " \"'"), text[1]) {
				return fmt.Errorf("%s:%d: %s is %q, want %s", file, i+1, strings.TrimSpace(key), text[1],
					wanted(reflect.TypeFor[time.Duration]()))
			}
		}
	}
	in, ok := errors.AsType[yaml.Error](err)
	if !ok {
		return located(err, file, nil)
	}
	at, text := in.GetToken().Position.Line, in.GetMessage()
	value, key := in.GetToken().Value, ""
	for t := in.GetToken().Prev; t != nil && key == ""; t = t.Prev {
		if t.Type == token.MappingValueType && t.Prev != nil { // a name may be missing
			key = t.Prev.Value
		}
	}
	if value == "{" || value == "[" {
		_, value, _ = strings.Cut(lines[at-1], key+": ")
	}
	wrong := fmt.Sprintf("%s is %s, want ", key, value)
	if mistyped, ok := errors.AsType[*yaml.TypeError](err); ok {
		text = wrong + wanted(mistyped.DstType)
	} else if large, ok := errors.AsType[*yaml.OverflowError](err); ok {
		text = wrong + wanted(large.DstType)
	} else if other, ok := errors.AsType[*yaml.UnexpectedNodeTypeError](err); ok {
		text = wrong + "a " + other.Expected.YAMLName()
	} else if unknown, ok := errors.AsType[*yaml.UnknownFieldError](err); ok {
		name := unknown.Token.Value
		text = fmt.Sprintf("there is no setting %q%s", name, didYouMean(name, keys(reflect.TypeFor[config](), "yaml")))
	}
	return fmt.Errorf("%s:%d: %s", file, at, text)
}

// checkNodes refuses what the YAML library accepts silently: several documents, and fractions for
// whole numbers.
func (c *config) checkNodes(file string, tree *ast.File) (err error) {
	if len(tree.Docs) > 1 {
		err = fmt.Errorf("%s: there are %d YAML documents, want one", file, len(tree.Docs))
	}
	for name, s := range settings.All(c) {
		path, bad := yaml.PathString("$." + name)
		if err != nil || bad != nil || !strings.Contains(s.Value.Type().String(), "int") {
			continue
		}
		if node, none := path.FilterFile(tree); none == nil && node.Type() == ast.FloatType {
			return fmt.Errorf("%s:%d: %s is %s, want %s", file, node.GetToken().Position.Line, name, node,
				wanted(s.Value.Type()))
		}
	}
	return err
}

// wanted names the values that a type accepts.
func wanted(t reflect.Type) string {
	if t == reflect.TypeFor[time.Duration]() {
		return "a time with a unit, as 1.5s"
	}
	if t == reflect.TypeFor[fleet.Probe]() {
		return "names with values, or none"
	}
	for kind, words := range map[string]string{
		"bool": "true or false", "int": "a whole number",
		"uint": "a whole number from 0 on", "float": "a number", "string": "a text", "[]": "a list", "ptr": "a number",
	} {
		if strings.HasPrefix(t.Kind().String(), kind) || kind == "[]" && t.Kind() == reflect.Slice {
			return words
		}
	}
	return "names with values"
}

// keys returns the names that the fields of a struct, and of the structs in it, have in files.
func keys(t reflect.Type, tag string) (names []string) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	for _, f := range reflect.VisibleFields(t) {
		if name, _, _ := strings.Cut(f.Tag.Get(tag), ","); name != "" {
			names = append(names, name)
		}
		if !f.Anonymous {
			names = append(names, keys(f.Type, tag)...)
		}
	}
	return names
}

var unknownField = regexp.MustCompile(`unknown field "(.*)"`)

// readElement decodes an element of one of the file's lists. An error begins with its place.
func readElement[T any](place string, data []byte, to *T) error {
	dec := json.NewDecoder(strings.NewReader(string(data)))
	dec.DisallowUnknownFields()
	err := dec.Decode(to)
	if err == nil {
		return nil
	}
	if mistyped, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("%s is a %s, want %s", strings.TrimSuffix(place+"."+mistyped.Field, "."), mistyped.Value,
			wanted(mistyped.Type))
	}
	if unknown := unknownField.FindStringSubmatch(err.Error()); unknown != nil {
		return fmt.Errorf("%s has a field %q, which no element has%s", place, unknown[1],
			didYouMean(unknown[1], keys(reflect.TypeFor[T](), "json")))
	}
	return fmt.Errorf("%s: %w", place, err)
}
