// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/scanner"
	"github.com/goccy/go-yaml/token"
)

// Bounds of a YAML file. Within them the YAML library needs a few seconds and a few hundred megabytes at most. Beyond
// them its time and memory grow with the square of the input, or without an end.
const (
	maxYAMLBytes  = 1 << 20
	maxYAMLTokens = 200_000 // also of a file whose aliases are replaced by copies
	maxYAMLDepth  = 32      // lists and mappings within each other
	maxYAMLNames  = 1_000   // of one mapping
	maxYAMLMarks  = 1_000   // anchors, aliases and tags
)

// readYAML returns the text of a YAML file. An error names the file, and the line if there is one.
func readYAML(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	data, err := io.ReadAll(io.LimitReader(f, maxYAMLBytes+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return data, nil
}

// parseYAML returns the tree of one YAML document. It returns an error for a text beyond the bounds, before it takes
// much memory, and for aliases that contain themselves.
func parseYAML(file string, data []byte) (tree *ast.File, err error) {
	defer recovered(&err)
	if err := checkYAMLTokens(file, data); err != nil {
		return nil, err
	}
	if tree, err = parser.ParseBytes(data, 0); err != nil {
		return nil, err
	}
	a := aliases{file: file, anchors: map[string]int{}}
	for _, doc := range tree.Docs {
		ast.Walk(&a, doc)
	}
	if a.err != nil {
		return nil, a.err
	}
	return tree, nil
}

// recovered turns a panic of a library that reads files into an error, so that no file ends a running router.
func recovered(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("the configuration cannot be read: %v", p)
	}
}

// block is a list or mapping that is open at a token.
type block struct {
	column int // 0: in brackets
	names  int // of a mapping
}

// checkYAMLTokens returns an error for a text beyond the bounds. It reads token by token and builds no tree.
func checkYAMLTokens(file string, data []byte) error {
	if len(data) > maxYAMLBytes {
		return fmt.Errorf("%s is larger than %d bytes, the limit", file, maxYAMLBytes)
	}
	var (
		s     scanner.Scanner
		open  []block
		n     int
		marks int
		docs  int // signs between documents
		last  *token.Token
	)
	s.Init(string(data))
	for {
		tokens, err := s.Scan()
		if errors.Is(err, io.EOF) {
			return nil
		}
		for _, t := range tokens {
			n++
			open = opened(open, last, t)
			last = t
			if t.Type == token.DocumentHeaderType || t.Type == token.DocumentEndType {
				docs++
			}
			if t.Type == token.AnchorType || t.Type == token.AliasType || t.Type == token.TagType {
				marks++
			}
			var what string
			switch {
			case marks > maxYAMLMarks:
				what = fmt.Sprintf("more than %d anchors, aliases and tags", maxYAMLMarks)
			case docs > 2:
				return fmt.Errorf("%s:%d: there are several YAML documents, want one", file, t.Position.Line)
			case t.Type == token.InvalidType:
				return fmt.Errorf("%s:%d: %s", file, t.Position.Line, t.Error)
			case n > maxYAMLTokens:
				what = fmt.Sprintf("more than %d values and signs", maxYAMLTokens)
			case len(open) > maxYAMLDepth:
				what = fmt.Sprintf("more than %d lists and mappings within each other", maxYAMLDepth)
			case len(open) > 0 && open[len(open)-1].names > maxYAMLNames:
				what = fmt.Sprintf("more than %d names in one mapping", maxYAMLNames)
			default:
				continue
			}
			return fmt.Errorf("%s:%d: there are %s, which is the limit", file, t.Position.Line, what)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
}

// opened returns the lists and mappings that are open after token t, which follows the token last.
func opened(open []block, last, t *token.Token) []block {
	column := t.Position.Column
	switch t.Type {
	case token.DocumentHeaderType, token.DocumentEndType:
		return nil
	case token.SequenceStartType, token.MappingStartType:
		return append(open, block{})
	case token.SequenceEndType, token.MappingEndType:
		for n := len(open); n > 0; n-- {
			if open[n-1].column == 0 {
				return open[:n-1]
			}
		}
		return nil
	case token.MappingValueType:
		if last != nil && last.Position.Line == t.Position.Line {
			column = last.Position.Column // of the name
		}
	case token.SequenceEntryType, token.MappingKeyType:
	default:
		return open
	}
	if n := len(open); n == 0 || open[n-1].column != 0 {
		for len(open) > 0 && open[len(open)-1].column > column {
			open = open[:len(open)-1]
		}
		if n := len(open); n == 0 || open[n-1].column < column {
			open = append(open, block{column: column})
		}
	}
	if t.Type != token.SequenceEntryType {
		open[len(open)-1].names++
	}
	return open
}

// aliases measures the file that remains when each alias is replaced by a copy of its anchor's value.
type aliases struct {
	file    string
	anchors map[string]int // nodes of each anchor's value; 0 while the value is being read
	size    int            // nodes so far
	err     error
}

// Visit counts a node, and reads the value of an anchor by itself.
func (a *aliases) Visit(node ast.Node) ast.Visitor {
	if a.err != nil || node == nil {
		return nil
	}
	refuse := func(text string, args ...any) ast.Visitor {
		a.err = fmt.Errorf("%s:%d: %s", a.file, node.GetToken().Position.Line, fmt.Sprintf(text, args...))
		return nil
	}
	a.size++
	switch n := node.(type) {
	case *ast.AnchorNode:
		name := n.Name.GetToken().Value
		if _, twice := a.anchors[name]; twice {
			return refuse("the anchor &%s is defined twice", name)
		}
		a.anchors[name] = 0
		before := a.size
		if n.Value != nil {
			ast.Walk(a, n.Value)
		}
		a.anchors[name] = a.size - before + 1
		return nil
	case *ast.AliasNode:
		name := n.Value.GetToken().Value
		size, known := a.anchors[name]
		if !known {
			return refuse("there is no anchor &%s above *%s", name, name)
		}
		if size == 0 {
			return refuse("*%s is within its own anchor &%s", name, name)
		}
		if a.size += size; a.size > maxYAMLTokens {
			return refuse("there are more than %d values when aliases such as *%s are replaced, which is the limit", maxYAMLTokens, name)
		}
		return nil
	}
	return a
}

// decodeYAML sets the fields of a value by a document that parseYAML has checked. Unknown fields are errors.
func decodeYAML(data []byte, to any) (err error) {
	defer recovered(&err)
	return yaml.UnmarshalWithOptions(data, to, yaml.Strict())
}
